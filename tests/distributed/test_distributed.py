"""`broadcast` and `scatter`: results on each rank, numbers of messages, and errors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from distributed_support import Ranks
from support import raises_exactly, run_python

from tdcopier import distributed


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Runs two ranks with gloo."""
    made = Ranks(2, "gloo", tmp_path_factory.mktemp("gloo"))
    yield made
    made.end()


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Runs three ranks with gloo."""
    made = Ranks(3, "gloo", tmp_path_factory.mktemp("gloo"))
    yield made
    made.end()


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Runs two ranks with NCCL and a GPU each."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    made = Ranks(2, "nccl", tmp_path_factory.mktemp("nccl"))
    yield made
    made.end()


@pytest.mark.parametrize("src", [0, 1])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_every_rank_gets_the_tree_of_the_source(ranks, src, device):
    ranks.run("whole_tree", src, device)


def test_any_value_may_be_the_root(ranks):
    ranks.run("any_root")


@pytest.mark.parametrize("leaves", [1, 300])
def test_two_messages_bring_any_number_of_leaves(ranks, leaves):
    assert ranks.run("messages", leaves) == [(2, 1, 1), (2, 1, 1)]


@pytest.mark.parametrize(
    "case",
    ["one_chunk_per_dtype", "gradient", "opaque", "source_is_as_it_was", "layouts_that_come_again"],
)
def test_what_arrives_is_of_its_own(ranks, case):
    ranks.run(case)


@pytest.mark.parametrize("src", [0, 1])
def test_tensordicts_arrive_with_their_device_set(ranks, src):
    ranks.run("tensordicts", src)


@pytest.mark.sim
def test_each_rank_may_ask_for_a_device_that_the_backend_does_not_know(ranks):
    ranks.run("to_sim")


@pytest.mark.sim
@pytest.mark.parametrize("call", ["broadcast", "scatter"])
def test_the_source_may_overwrite_its_tree_when_the_call_returns(ranks, call):
    assert ranks.run("overwritten_at_once", call) == [[1], [1]]


@pytest.mark.parametrize("src", [0, 1])
def test_scatter_gives_each_rank_a_tree_of_its_own(ranks, src):
    ranks.run("scattered", src, None)


@pytest.mark.parametrize("dst", [0, 2])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_gather_brings_the_trees_of_all_ranks_to_one(three, dst, device):
    three.run("gathered", dst, device)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_all_gather_brings_the_trees_of_all_ranks_to_all(three, device):
    three.run("all_gathered", device)


def test_a_part_of_the_ranks_gathers_among_itself(three):
    three.run("gathered_by_a_part")


CANNOT = "data['a'][1] cannot be pickled ("


@pytest.mark.parametrize(
    ("name", "starts"),
    [
        ("one cannot send", ("rank 1 could not send: " + CANNOT, CANNOT)),
        ("one of all cannot", (CANNOT, "rank 0 could not send: " + CANNOT)),
        ("none can send", (CANNOT, CANNOT)),
        ("no such destination", ("dst is 9, which is not a rank",) * 2),
        ("destination that is no rank", ("dst must be a rank, which is an int",) * 2),
    ],
)
def test_mistakes_of_a_gather_are_raised_on_every_rank(ranks, name, starts):
    for (kind, text), start in zip(ranks.run("gather_mistake", name), starts, strict=True):
        assert kind == ("ValueError" if name == "no such destination" else "TypeError")
        assert text.startswith(start)


@pytest.mark.parametrize("where", [0, 1], ids=["receiver", "source"])
def test_messages_are_where_the_group_needs_them_whatever_the_default_device(ranks, where):
    ranks.run("under_a_default_device", where)


def test_a_group_of_one_rank_needs_nobody_else(ranks):
    ranks.run("group_of_one")


BOTH_RAISE = {
    "unpicklable": ("TypeError", "data['a'][1] cannot be pickled ("),
    "unpicklable in an object": ("TypeError", "data['a'].y cannot be pickled (ValueError: never"),
    "holds itself": ("RecursionError", ""),
    "cannot be copied": ("TypeError", "data[0] "),
    "too few trees": ("ValueError", "trees must have one tree for each of the 2 ranks; got 1"),
    "no list of trees": ("TypeError", "trees must be a list or tuple of one tree for each rank"),
    "unpicklable, scattered": ("TypeError", "data['a'] cannot be pickled ("),
}


@pytest.mark.parametrize("name", BOTH_RAISE)
def test_what_keeps_the_source_from_sending_is_raised_on_every_rank(ranks, name):
    kind, start = BOTH_RAISE[name]
    (other_kind, other_text), (source_kind, source_text) = ranks.run("mistake", name)
    assert (source_kind, other_kind) == (kind, kind)
    assert source_text.startswith(start)
    assert other_text == f"rank 1 could not send: {source_text}"


@pytest.mark.parametrize(
    ("name", "at_source", "at_other"),
    [
        (
            "no memory",
            ("OutOfMemoryError", "none left"),
            ("RuntimeError", "rank 1 could not send: OutOfMemoryError: none left"),
        ),
        (
            "subclass",
            ("NotLikeThis", "never"),
            ("ValueError", "rank 1 could not send: NotLikeThis: never"),
        ),
        (
            "no text",
            ("Untold", ""),
            ("RuntimeError", "rank 1 could not send: Untold: its text cannot be had"),
        ),
    ],
)
def test_an_error_of_any_class_is_caught_by_the_same_except(ranks, name, at_source, at_other):
    assert ranks.run("other_error", name) == [at_other, at_source]


def test_a_device_that_there_is_not_is_the_same_error_on_every_rank(ranks):
    (other, source) = ranks.run("no_such_device")
    assert other == source
    assert source[0] == "ValueError"
    assert source[1].startswith("unknown device 'nowhere'")


def test_what_could_not_be_sent_is_freed_with_its_error(ranks):
    ranks.run("failure_frees_the_tree")


def test_the_source_of_a_scatter_keeps_no_second_copy_of_what_it_sends(ranks):
    ranks.run("scatter_keeps_no_second_copy")


def test_groups_of_some_of_three_ranks(three):
    three.run("some_of_three")


def test_scatter_sends_to_two_others(three):
    three.run("scattered", 1, None)


ONE_RAISES = {
    "no such source": ("ValueError", "src is 7, which is not a rank of the group: [0, 1]"),
    "source that is no rank": ("TypeError", "src must be a rank, which is an int; got '0'"),
    "tree on every rank": (
        "ValueError",
        "rank 0 was given tree, and is not the source, which is rank 1: give None",
    ),
    "trees on every rank": (
        "ValueError",
        "rank 0 was given trees, and is not the source, which is rank 1: give None",
    ),
    "not in the group": ("ValueError", "this rank is 1, which is not a rank of the group: [0]"),
}


@pytest.mark.parametrize("name", ONE_RAISES)
def test_a_mistake_in_the_call_is_raised_before_any_message(ranks, name):
    found = [each for each in ranks.run("mistake", name) if each != ("", "")]
    assert set(found) == {ONE_RAISES[name]}


@pytest.mark.parametrize("call", [distributed.broadcast, distributed.scatter])
def test_without_a_process_group_the_call_says_what_is_missing(call):
    message = "torch.distributed has not been initialised: call init_process_group() first"
    with raises_exactly(RuntimeError, message):
        call(None, 0)


def test_importing_tdcopier_does_not_import_this():
    code = "import sys, tdcopier; assert 'tdcopier.distributed' not in sys.modules"
    assert run_python(code) == ""


# ---- NCCL ----------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("case", "arguments"),
    [
        ("whole_tree", (0, None)),
        ("whole_tree", (1, "cpu")),
        ("any_root", ()),
        ("layouts_that_come_again", ()),
        ("one_chunk_per_dtype", ()),
        ("gradient", ()),
        ("tensordicts", (1,)),
        ("scattered", (0, None)),
        ("scattered", (1, "cpu")),
        ("gathered", (0, None)),
        ("gathered", (1, "cpu")),
        ("all_gathered", (None,)),
        ("all_gathered", ("cpu",)),
    ],
)
def test_nccl_brings_the_same_to_each_ranks_own_gpu(gpus, case, arguments):
    gpus.run(case, *arguments)


@pytest.mark.cuda
def test_two_messages_bring_any_number_of_leaves_through_nccl(gpus):
    gpus.run("messages", 2)
    assert gpus.run("messages", 300) == [(3, 1, 1), (3, 1, 1)]  # one with the structure
    assert gpus.run("messages", 300) == [(2, 1, 1), (2, 1, 1)]


@pytest.mark.cuda
def test_nccl_raises_on_every_rank_what_keeps_the_source_from_sending(gpus):
    found = gpus.run("mistake", "unpicklable")
    assert [kind for kind, _ in found] == ["TypeError", "TypeError"]
