"""Many threads at once, in every direction; the sanitizers run the same copies."""

from __future__ import annotations

from stress_copies import WAYS, Stress


def test_fifteen_copies_by_each_of_32_threads_equal_what_to_gives(device, accelerator):
    devices = [f"{device[:-1]}{i}" for i in range(min(accelerator.device_count(), 2))]
    stress = Stress(devices)
    stress.run(threads=32, copies_each=15)
    assert sum(stress.counts.values()) == 480
    assert set(stress.counts) == {way.__name__ for way in WAYS}
