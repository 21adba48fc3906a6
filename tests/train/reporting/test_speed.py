import math

import pytest
import torch

from megatron_fsdp.train.launch.ranks import Rank
from megatron_fsdp.train.options.command_line import parse_options
from megatron_fsdp.train.options.job import World
from megatron_fsdp.train.options.resolve import resolve
from megatron_fsdp.train.reporting.peak import Peak, find_peak, measure_cpu, peak_by_name
from megatron_fsdp.train.reporting.speed import Speed
from tests.conftest import RunRanks


def test_speeds_of_a_step_of_half_a_second() -> None:
    speed = Speed(tokens=1000, flops=6e12, ranks=4, peak_tflops=12.0)
    assert (speed.tokens_per_s(0.5), speed.tflops(0.5), speed.mfu(0.5)) == (2000.0, 3.0, 0.25)


def test_what_is_not_known_makes_nothing_known() -> None:
    assert math.isnan(Speed(1000).tflops(0.5))
    assert math.isnan(Speed(1000, flops=1e12).mfu(0.5))


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA B200", 2250.0),
    ],
)
def test_peaks_go_by_the_name_of_the_device(name: str, tflops: float) -> None:
    assert peak_by_name(name, torch.bfloat16).tflops == tflops


def test_peaks_of_other_devices_and_dtypes_are_not_known_in_words() -> None:
    other = peak_by_name("NVIDIA RTX A1000", torch.bfloat16)
    assert math.isnan(other.tflops)
    assert other.source == "not known for NVIDIA RTX A1000; --peak-tflops tells it"
    assert peak_by_name("NVIDIA H100", torch.float32).source == "not known for float32; --peak-tflops tells it"


def test_a_processor_is_measured_by_its_products(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.01  # every product takes a hundredth of a second
        return now[0]

    monkeypatch.setattr("megatron_fsdp.train.reporting.peak.time.perf_counter", clock)
    assert measure_cpu(torch.float32) == pytest.approx(2 * 512**3 / 0.01 / 1e12)


def found_peaks(*flags: str) -> tuple[Peak, bool]:
    import torch.distributed as dist

    state = torch.get_rng_state()
    job = resolve(parse_options(["--preset", "tiny", *flags]), World(2, "cpu"))
    rank = Rank(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), 0)
    return find_peak(job, rank), torch.equal(torch.get_rng_state(), state)


def test_ranks_agree_on_the_peak(run_ranks: RunRanks) -> None:
    (first, kept), (second, _) = run_ranks(2, found_peaks)
    assert first == second
    assert first.tflops > 0
    assert kept
    assert run_ranks(2, found_peaks, "--peak-tflops", "2.5")[1][0] == Peak(2.5, "--peak-tflops")
