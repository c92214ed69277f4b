"""CUDA graphs: a call during the caller's capture is refused, other captures are not disturbed."""

from __future__ import annotations

import threading

import pytest
import torch

import tdcopier
from tdcopier.workloads import detection_batch

pytestmark = pytest.mark.cuda


def test_a_call_during_the_callers_capture_is_refused_and_the_capture_goes_on(device):
    counter = torch.zeros(1, device=device)
    early = tdcopier.start_copy([torch.ones(2)], device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter += 1
        for call in (lambda: tdcopier.start_copy([torch.ones(2)], device), early.get, early.wait):
            with pytest.raises(RuntimeError, match="while its stream is capturing a CUDA graph"):
                call()
    graph.replay()
    assert counter.item() == 1
    assert early.get()[0].tolist() == [1, 1]


def test_a_call_during_the_capture_of_a_sources_stream_is_refused(device):
    counter = torch.zeros(1, device=device)
    sources = [torch.ones(2, device=device), torch.ones(3, device=device)]
    early = tdcopier.start_copy(sources, "cpu")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter += 1
        for call in (lambda: tdcopier.start_copy(sources, "cpu"), early.wait_staged):
            with pytest.raises(RuntimeError, match="while its stream is capturing a CUDA graph"):
                call()
    graph.replay()
    assert counter.item() == 1
    assert early.get()[1].tolist() == [1, 1, 1]


def test_copies_on_another_thread_do_not_disturb_a_capture(device):
    batch = detection_batch()
    large = torch.ones(4 << 20)
    stop = threading.Event()
    copied = []
    failures = []

    def copies():
        try:
            while not stop.is_set():
                moved = tdcopier.start_copy(batch, device).wait()
                tdcopier.start_copy(moved, "cpu").get()
                tdcopier.copy([large], device)
                copied.append(1)
        except Exception as error:
            failures.append(error)

    counter = torch.zeros(1, device=device)
    tdcopier.copy([batch, large], device)
    thread = threading.Thread(target=copies)
    thread.start()
    try:
        graphs = 0
        while graphs < 20 or len(copied) < 20:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="global"):
                for _ in range(50):
                    counter += 1
            graph.replay()
            graphs += 1
            assert not failures
    finally:
        stop.set()
        thread.join()
    assert not failures
    assert counter.item() == 50 * graphs
