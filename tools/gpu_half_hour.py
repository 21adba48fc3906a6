"""Check and measure the package on one GPU within half an hour, in three parts of at most 9 minutes each.

    python tools/gpu_half_hour.py --part 1 --out DIR     # right: parity, real streams, ranks that share the GPU
    python tools/gpu_half_hour.py --part 2 --out DIR     # fast: layers of an 8B model beside torch and FSDP2; graphs
    python tools/gpu_half_hour.py --part 3 --out DIR     # offload: full training of an 8B model beside resident runs

It needs a checkout and a Python with torch, and neither pip nor network. Every section runs in a process of its own
with a deadline, so that one that fails or hangs stops nothing. Each number is a line of `DIR/part<N>.jsonl` as soon as
it is known, and traces lie beside it. `--device cpu` rehearses it, with small sizes. What tests marked `gpu` check (no
waits of the host, replayed steps) is theirs, and runs in part 1.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

PART_S = {1: 540.0, 2: 540.0, 3: 540.0}
LEAST_S = 5.0
"""The least seconds for which a section is started."""


@dataclass
class Session:
    """The device of a section and its notes."""

    device: torch.device  # "cuda", or "cpu" for a rehearsal
    out: Path
    part: int
    section: str = ""  # name of the section that runs

    @property
    def is_gpu(self) -> bool:
        """True on a GPU; False in a rehearsal."""
        return self.device.type == "cuda"

    def note(self, what: str, **facts: Any) -> None:
        """Write one line of results and flush it."""
        line = {"section": self.section, "what": what, **facts}
        with (self.out / f"part{self.part}.jsonl").open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")
        print(f"[{self.section}] {what}: " + ", ".join(f"{key}={value}" for key, value in facts.items()), flush=True)

    def finish(self) -> None:
        """Synchronise the device."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def free(self) -> None:
        """Free the memory of deleted models."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()
            torch._C._host_emptyCache()  # pinned memory, of which the next one takes another lot
            torch.cuda.reset_peak_memory_stats()


# ---- models ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Sizes of decoder layers, and the sequence lengths to measure."""

    dim: int
    hidden: int
    heads: int
    kv_heads: int
    layers: int = 4
    tokens: tuple[int, ...] = (4096, 8192)


LLAMA_8B = Sizes(4096, 14336, 32, 8)
REHEARSAL = Sizes(64, 128, 4, 2, 2, (16, 32))


class Layer(nn.Module):
    """A Llama decoder layer without rotary embeddings: (batch, tokens, dim) in and out."""

    def __init__(self, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        head = sizes.dim // sizes.heads
        self.heads, self.kv_heads = sizes.heads, sizes.kv_heads
        self.attention_norm = nn.RMSNorm(sizes.dim, **made)
        self.q = nn.Linear(sizes.dim, sizes.heads * head, bias=False, **made)
        self.k = nn.Linear(sizes.dim, sizes.kv_heads * head, bias=False, **made)
        self.v = nn.Linear(sizes.dim, sizes.kv_heads * head, bias=False, **made)
        self.o = nn.Linear(sizes.heads * head, sizes.dim, bias=False, **made)
        self.mlp_norm = nn.RMSNorm(sizes.dim, **made)
        self.gate = nn.Linear(sizes.dim, sizes.hidden, bias=False, **made)
        self.up = nn.Linear(sizes.dim, sizes.hidden, bias=False, **made)
        self.down = nn.Linear(sizes.hidden, sizes.dim, bias=False, **made)

    def forward(self, x: Tensor) -> Tensor:
        """Run attention and MLP."""
        y = self.attention_norm(x)
        q = self.q(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (part(y).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2) for part in (self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).flatten(-2))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def layers(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Make the same decoder layers on the device in every call."""
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(sizes, device, dtype) for _ in range(sizes.layers)))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """Return the mean square of the output."""
    return model(x).float().square().mean()


def small(session: Session, dtype: torch.dtype, **arguments: Any) -> tuple[nn.Module, Any]:
    """Shard small layers, trained by SGD unless told otherwise."""
    from megatron_fsdp import fully_shard

    model = layers(REHEARSAL, session.device, dtype)
    optimizer = arguments.pop("optimizer", partial(torch.optim.SGD, lr=0.1))(model.parameters())
    return fully_shard(model, optimizer, fsdp_unit_modules=[Layer], **arguments)


def stepping(model: nn.Module, optimizer: Any, x: Tensor, in_backward: bool = False) -> Callable[[], None]:
    """Return a function that trains a step, with an optimizer in backward if asked."""

    def step() -> None:
        with optimizer.step_in_backward() if in_backward else nullcontext():
            loss_of(model, x).backward()
        if not in_backward:
            optimizer.step()
        optimizer.zero_grad()

    return step


def start_alone(device: torch.device, world_size: int = 1) -> None:
    """Initialise one rank, or the first of several whose collectives are simulated."""
    if world_size > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        return
    from megatron_fsdp.comm.groups import bound_device

    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=dist.HashStore(),  # type: ignore[attr-defined]  # a port could be taken
        rank=0,
        world_size=1,
        device_id=bound_device(backend, torch.device("cuda", 0)),  # None for gloo
    )


# ---- part 1: right ---------------------------------------------------------------------------------------------------


def machine(session: Session) -> None:
    """Note versions, device and driver."""
    facts: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version()}
    if session.is_gpu:
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "device": properties.name,
            "memory GiB": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    session.note("versions", **facts)


def gpu_tests(session: Session) -> None:
    """Run the tests that need a GPU; pytest's output goes to gpu_tests.log."""
    if importlib.util.find_spec("pytest") is None:
        session.note("not run", reason="this Python has no pytest")
        return
    files = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text())
    if not session.is_gpu:
        session.note("not run", reason="a rehearsal", files=len(files))
        return
    options = ["-m", "gpu", "-p", "no:cacheprovider", "--continue-on-collection-errors", "-rfE", "--tb=short"]
    log = session.out / "gpu_tests.log"
    with log.open("w") as output:
        command = [sys.executable, "-m", "pytest", *options, *map(str, files)]
        code = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    session.note("pytest", rc=code, said=log.read_text().strip().splitlines()[-8:])


POLICIES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def train(model: nn.Module, optimizer: Any, batches: list[list[Tensor]]) -> list[Tensor]:
    """Train a step for each list of microbatches, one backward each, and return losses and gradients."""
    seen = []
    for microbatches in batches:
        for x in microbatches:
            loss = loss_of(model, x) / len(microbatches)
            loss.backward()
            seen.append(loss.detach().clone())
        seen += [_local(p.grad).clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def batches_of(sizes: Sizes, device: torch.device, dtype: torch.dtype, part: slice = slice(None)) -> list[list[Tensor]]:
    """Return two steps of two microbatches of 12 short sequences, or a part of each."""
    draws = torch.Generator().manual_seed(1)
    whole = [[torch.randn(12, 8, sizes.dim, generator=draws) for _ in range(2)] for _ in range(2)]
    return [[x[part].to(device, dtype) for x in step] for step in whole]


def alone(session: Session) -> None:
    """Compare every strategy on one rank with plain torch, and with itself under injected delays, bit for bit."""
    from tests.support.delays import inject_delays

    start_alone(session.device)
    for precision, dtype in POLICIES.items():
        batches = batches_of(REHEARSAL, session.device, dtype)
        plain = layers(REHEARSAL, session.device, dtype)
        expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), batches)
        for strategy in range(4):
            runs = []
            for delays in (False, True):
                sharded, optimizer = small(session, dtype, zero_dp_strategy=strategy)
                with inject_delays(sharded, seed=strategy, up_to_s=0.002) if delays else nullcontext():  # type: ignore[arg-type]
                    runs.append(train(sharded, optimizer, batches))
            session.finish()
            undelayed, delayed = runs
            session.note(
                f"{precision}, strategy {strategy}",
                off_plain=max(map(_off, undelayed, expected)),
                equal_under_delays=all(map(torch.equal, undelayed, delayed)),
            )


def _off(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, by the largest value expected."""
    found, expected = found.reshape(-1).double(), expected.reshape(-1).double()
    if not expected.numel():
        return 0.0  # a shard of one of several ranks may be empty
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-12))


def formats(session: Session) -> None:
    """Compare codes and decoded weights with those of the CPU bit for bit, and float8 products with emulated ones."""
    from megatron_fsdp import MixedPrecisionPolicy
    from megatron_fsdp.formats import fp8_linear
    from megatron_fsdp.sharding.weight_formats import WEIGHT_FORMATS, encoded_bytes

    start_alone(session.device)
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    for name in ("fp8", "mxfp8", "nvfp4"):
        weight_format, seen = WEIGHT_FORMATS[name], []
        for device in (CPU, session.device):
            shard = values.to(device)
            scale = weight_format.scales(weight_format.amax(shard))
            codes = torch.empty(encoded_bytes(weight_format, shard.numel()), dtype=torch.uint8, device=device)
            weight_format.encode(shard, scale, codes)
            decoded = torch.empty(shard.numel(), dtype=torch.bfloat16, device=device)
            weight_format.decode(codes, scale, decoded)
            seen.append((codes.cpu(), decoded.cpu()))
        session.note(name, equals_cpu=all(map(torch.equal, *seen)))
    batches = batches_of(REHEARSAL, session.device, torch.bfloat16)
    policy = MixedPrecisionPolicy(main_grads_dtype=torch.float32, weight_format="fp8_compute")
    runs, native = [], fp8_linear.multiplies_float8
    for multiplies in (native, lambda _: False):
        fp8_linear.multiplies_float8 = multiplies
        try:
            runs.append(train(*small(session, torch.bfloat16, mixed_precision_policy=policy), batches))
        finally:
            fp8_linear.multiplies_float8 = native
    session.note("fp8_compute", off_emulation=max(map(_off, *runs)))


def optimizers(session: Session) -> None:
    """Compare Muon, Adafactor and AdamW in 32 and in 8 bits with the same classes in plain torch."""
    from megatron_fsdp.optim.adamw8bit import AdamW8bit

    start_alone(session.device)
    batches = batches_of(REHEARSAL, session.device, torch.float32)
    makers: dict[str, Callable[[Any], Any]] = {
        "Muon": lambda params: torch.optim.Muon([p for p in params if p.ndim == 2], lr=0.02),
        "Adafactor": partial(torch.optim.Adafactor, lr=0.02),
        "AdamW8bit": partial(AdamW8bit, lr=0.01),
        "AdamW": partial(torch.optim.AdamW, lr=0.01, fused=session.is_gpu),
    }
    for name, make in makers.items():
        plain = layers(REHEARSAL, session.device, torch.float32)
        expected = train(plain, make(plain.parameters()), batches)
        expected += [param.detach().clone() for param in plain.parameters()]
        for strategy in (0, 3):
            model, optimizer = small(session, torch.float32, optimizer=make, zero_dp_strategy=strategy)
            found = train(model, optimizer, batches) + [_local(p.detach()).clone() for p in model.parameters()]
            session.note(f"{name}, strategy {strategy}", off_plain=max(map(_off, found, expected)))


def offloaded(session: Session) -> None:
    """Compare offloaded state with the resident run, over two steps; `alone` compares that with plain torch."""
    from megatron_fsdp import MixedPrecisionPolicy

    start_alone(session.device)
    batches = batches_of(REHEARSAL, session.device, torch.bfloat16)
    policy = MixedPrecisionPolicy(main_grads_dtype=torch.float32)
    adamw = partial(torch.optim.AdamW, lr=0.01, fused=True)
    for strategy in (1, 3):
        resident: list[Tensor] = []
        for kinds in (None, ["optimizer_state"], ["compute_weights"], ["main_weights"], "all"):
            if strategy == 1 and kinds in (["compute_weights"], "all"):
                continue  # whole compute weights stay on the device
            options: dict[str, Any] = {"offload": kinds, "mixed_precision_policy": policy}
            model, optimizer = small(session, torch.bfloat16, optimizer=adamw, zero_dp_strategy=strategy, **options)
            found = train(model, optimizer, batches) + list(model.full_parameters().values())  # type: ignore[operator]
            resident = resident or found
            off = max(_off(one.cpu(), other.cpu()) for one, other in zip(found, resident, strict=True))
            session.note(f"{kinds}, strategy {strategy}", off_resident=off)


CPU = torch.device("cpu")


def shared_gpu(session: Session) -> None:
    """Compare 2 and 4 processes on one GPU over gloo with one process: strategies, hybrid sharding, recomputation."""
    for ranks in (2, 4):
        store = session.out / f"store{ranks}.{os.getpid()}"
        command = [sys.executable, __file__, "--rank-of", str(ranks), "--store", str(store), *_arguments(session)]
        started = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(ranks)]
        codes = [process.wait() for process in started]
        store.unlink(missing_ok=True)
        if any(codes):
            session.note(f"{ranks} ranks", exit_codes=codes)


def rank_of_shared_gpu(session: Session, rank: int, ranks: int, store: str) -> None:
    """Train on one of the ranks that share the GPU, and compare with the whole batch in this process."""
    from torch.distributed.device_mesh import init_device_mesh

    os.environ["MFSDP_MESSAGE_BYTES"] = "0"  # the layers of the rehearsal are small, and stay units of their own
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    own = slice(rank * 12 // ranks, (rank + 1) * 12 // ranks)
    plain = layers(REHEARSAL, session.device, torch.float32)
    whole = batches_of(REHEARSAL, session.device, torch.float32)
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), whole)
    cases: list[tuple[str, dict[str, Any]]] = [(f"strategy {k}", {"zero_dp_strategy": k}) for k in range(4)]
    mesh = init_device_mesh(session.device.type, (2, ranks // 2), mesh_dim_names=("outer", "shard"))
    group = mesh["outer", "shard"]._flatten("all").get_group()
    hybrid = {"device_mesh": mesh, "dp_shard_dim": "shard", "dp_outer_dim": "outer", "hybrid_fsdp_group": group}
    cases += [("hybrid", hybrid), ("fully hybrid", {**hybrid, "outer_dp_sharding_strategy": 1})]
    for name, arguments in cases:
        sharded, optimizer = small(session, torch.float32, **arguments)
        train(sharded, optimizer, batches_of(REHEARSAL, session.device, torch.float32, own))
        found = sharded.full_parameters()  # type: ignore[operator]
        if rank == 0:
            off = max(_off(found[key], param.detach()) for key, param in plain.named_parameters())
            session.note(f"{ranks} ranks, {name}", weights_off_one_process=off)
    for name, arguments in [*cases[:4], cases[-1]]:
        options: dict[str, Any] = {"deterministic": "world", "calculate_per_token_loss": True}
        sharded, optimizer = small(session, torch.float32, **options, **arguments)
        _train_by_numbers(sharded, optimizer, session.device, rank, ranks)
        found = sharded.full_parameters()  # type: ignore[operator]
        plain = layers(REHEARSAL, session.device, torch.float32)
        _train_by_numbers(plain, torch.optim.SGD(plain.parameters(), lr=0.1), session.device)
        if rank == 0:
            equal = all(torch.equal(found[key], param.detach()) for key, param in plain.named_parameters())
            session.note(f"{ranks} ranks, {name}, deterministic", equals_one_process=equal)
    dist.destroy_process_group()


def _train_by_numbers(model: Any, optimizer: Any, device: torch.device, rank: int = 0, ranks: int = 1) -> None:
    """Train two steps of 12 numbered microbatches, dealt to the ranks in turn."""
    for step in batches_of(REHEARSAL, device, torch.float32):
        for number in range(rank, 12, ranks):
            if ranks > 1:
                model.set_model_auto_sync(number + ranks >= 12)
            (loss_of(model, step[0][number : number + 1]) / 12).backward()
        optimizer.step()
        optimizer.zero_grad()


def out_of_memory(session: Session) -> None:
    """Run out of memory in a forward, reset, and compare the steps that follow with a run that never did."""
    start_alone(session.device)
    batches = batches_of(REHEARSAL, session.device, torch.float32)
    results = []
    for fails in (False, True):
        sharded, optimizer = small(session, torch.float32, zero_dp_strategy=3)
        if fails:
            size = torch.cuda.get_device_properties(0).total_memory if session.is_gpu else 2**62
            handle = sharded.module[1].register_forward_pre_hook(  # type: ignore[index, union-attr]
                lambda *_, size=size: torch.empty(size, dtype=torch.uint8, device=session.device) and None
            )
            try:
                loss_of(sharded, batches[0][0]).backward()
            except RuntimeError as error:
                session.note("raised", error=type(error).__name__)
            handle.remove()
            sharded.reset()  # type: ignore[operator]
            optimizer.zero_grad()
        results.append(train(sharded, optimizer, batches))
    session.note("after a reset", equal=all(map(torch.equal, *results)))


# ---- part 2: fast ----------------------------------------------------------------------------------------------------


class MasterWeights:
    """The baseline: a bf16 model with fp32 main weights and fused AdamW in plain torch."""

    def __init__(self, model: nn.Module, fused: bool) -> None:
        self.model = list(model.parameters())
        self.main = [p.detach().float() for p in self.model]
        for main in self.main:
            main.grad = torch.zeros_like(main)
        self.adam = torch.optim.AdamW(self.main, fused=fused)

    def step(self) -> None:
        """Update the main weights, and copy them into the model."""
        grads = [p.grad for p in self.model if p.grad is not None]
        torch._foreach_copy_([main.grad for main in self.main], grads)  # type: ignore[misc]
        self.adam.step()
        with torch.no_grad():
            torch._foreach_copy_(self.model, self.main)  # type: ignore[arg-type]

    def zero_grad(self) -> None:
        """Drop the gradients of the model."""
        for param in self.model:
            param.grad = None


def contenders(session: Session, sizes: Sizes) -> dict[str, Callable[[], tuple[nn.Module, Any]]]:
    """Return builders of a model and its optimizer, by name."""
    from torch.distributed.fsdp import MixedPrecisionPolicy as Fsdp2Policy
    from torch.distributed.fsdp import fully_shard as fsdp2

    from megatron_fsdp import MixedPrecisionPolicy, fully_shard

    def plain() -> tuple[nn.Module, Any]:
        model = layers(sizes, session.device, torch.bfloat16)
        return model, MasterWeights(model, session.is_gpu)

    def torch_fsdp2() -> tuple[nn.Module, Any]:
        model = layers(sizes, session.device, torch.float32)
        policy = Fsdp2Policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.children():
            fsdp2(layer, mp_policy=policy)
        fsdp2(model, mp_policy=policy)
        return model, torch.optim.AdamW(model.parameters(), fused=session.is_gpu)

    def ours(strategy: int) -> tuple[nn.Module, Any]:
        model = layers(sizes, session.device, torch.bfloat16)
        return fully_shard(
            model,
            torch.optim.AdamW(model.parameters(), fused=session.is_gpu),
            fsdp_unit_modules=[Layer],
            zero_dp_strategy=strategy,
            mixed_precision_policy=MixedPrecisionPolicy(main_grads_dtype=torch.float32),
        )

    return {
        "plain torch": plain,
        "fsdp2": torch_fsdp2,
        "ours 0": partial(ours, 0),
        "ours 3": partial(ours, 3),
    }


def measure(session: Session, step: Callable[[], object], count: int) -> tuple[float, float]:
    """Return the median milliseconds of steps on the device, and on the host until all is queued."""
    device, host = [], []
    for _ in range(count):
        session.finish()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if session.is_gpu else []
        begin = time.perf_counter()
        for event in events[:1]:
            event.record()
        step()
        host.append((time.perf_counter() - begin) * 1e3)
        for event in events[1:]:
            event.record()
        session.finish()
        device.append(events[0].elapsed_time(events[1]) if events else host[-1])
    return statistics.median(device), statistics.median(host)


_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def profiled(session: Session, step: Callable[[], None], trace: Path | None) -> dict[str, Any]:
    """Count kernels and waits of one step, and the share of time without a kernel."""
    if not session.is_gpu:
        step()
        return {}
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step()
        session.finish()
    events = list(found.events() or [])
    on_device = sorted((e.time_range.start, e.time_range.end) for e in events if e.device_type.name == "CUDA")
    busy, reached = 0.0, float("-inf")
    for start, end in on_device:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    span = on_device[-1][1] - on_device[0][0] if on_device else 0.0
    if trace is not None:
        found.export_chrome_trace(str(trace))
    return {
        "kernels": len(on_device),
        "idle share": round(1 - busy / span, 4) if span else None,
        # One wait is this function's own.
        "waits": max(0, sum(e.name in _WAITS for e in events) - 1),
    }


def _compare(session: Session, world_size: int, names: list[str], rounds: int) -> None:
    sizes = LLAMA_8B if session.is_gpu else REHEARSAL
    start_alone(session.device, world_size)
    made = contenders(session, sizes)
    for tokens in sizes.tokens:
        x = torch.randn(1, tokens, sizes.dim, device=session.device, dtype=torch.bfloat16)
        for turn in range(rounds):
            for name in names:
                session.free()
                model, optimizer = made[name]()
                step = stepping(model, optimizer, x)
                for _ in range(3):
                    step()
                session.finish()
                if session.is_gpu:
                    torch.cuda.reset_peak_memory_stats()
                device_ms, host_ms = measure(session, step, 5)
                facts: dict[str, Any] = {"device ms": round(device_ms, 3), "host ms": round(host_ms, 3)}
                if session.is_gpu:
                    stats = torch.cuda.memory_stats()
                    facts |= {
                        "allocated GiB": round(stats["allocated_bytes.all.peak"] / 2**30, 3),
                        "reserved GiB": round(stats["reserved_bytes.all.peak"] / 2**30, 3),
                        "retries": stats["num_alloc_retries"],
                    }
                if turn == 0:
                    name_of_trace = f"trace-{world_size}-{tokens}-{name.replace(' ', '_').replace(',', '')}.json"
                    facts |= profiled(session, step, session.out / name_of_trace if tokens == sizes.tokens[0] else None)
                session.note(f"{name}, rank 0 of {world_size}, {tokens} tokens, round {turn}", **facts)
                del model, optimizer, step


def world_size_1(session: Session) -> None:
    """Measure all contenders on a single rank, interleaved."""
    _compare(session, 1, list(contenders(session, REHEARSAL)), 3)


def rank_0_of(world_size: int, session: Session) -> None:
    """Measure one rank of several with simulated collectives: memory, host time and kernels are real."""
    _compare(session, world_size, ["fsdp2", "ours 0", "ours 3"], 1)


def unit_graphs(session: Session) -> None:
    """Compare units captured by torch, forward and backward, with eager units: values and times."""
    from megatron_fsdp import MixedPrecisionPolicy, fully_shard

    start_alone(session.device)
    draws = torch.Generator(session.device).manual_seed(0)
    batches = [
        torch.randn(1, 64, REHEARSAL.dim, device=session.device, dtype=torch.bfloat16, generator=draws)
        for _ in range(8)
    ]
    ways: dict[str, dict[str, Any] | None] = {
        "eager": None,
        "cudagraphs": {"backend": "cudagraphs"},
        "reduce-overhead": {"mode": "reduce-overhead"},
    }
    for strategy in (0, 3):
        expected: list[Tensor] = []
        for way, options in ways.items():
            torch._dynamo.reset()
            model = layers(REHEARSAL, session.device, torch.bfloat16)
            for layer in model.children() if options is not None else ():
                layer.compile(fullgraph=True, **options)  # type: ignore[arg-type]
            sharded, optimizer = fully_shard(
                model,
                torch.optim.AdamW(model.parameters(), lr=1e-3, fused=session.is_gpu, capturable=session.is_gpu),
                fsdp_unit_modules=[Layer],
                zero_dp_strategy=strategy,
                cuda_graph_mode=True,
                mixed_precision_policy=MixedPrecisionPolicy(main_grads_dtype=torch.float32),
            )
            for x in batches:
                stepping(sharded, optimizer, x)()
            found = [_local(param.detach()).clone() for param in sharded.parameters()]
            expected = expected or found
            device_ms, host_ms = measure(session, stepping(sharded, optimizer, batches[0]), 10)
            facts = profiled(session, stepping(sharded, optimizer, batches[0]), None)
            session.note(
                f"strategy {strategy}, {way}",
                off_eager=max(map(_off, found, expected)),
                device_ms=round(device_ms, 3),
                host_ms=round(host_ms, 3),
                **facts,
            )


# ---- part 3: offload -------------------------------------------------------------------------------------------------

OFFLOADED: dict[str, tuple[Any, int]] = {
    "resident": (None, 0),
    "optimizer state on the host": (["optimizer_state"], 9),
    "all state on the host": ("all", 20),
}
"""Kinds of offload, and the host memory in bytes per parameter, with some to spare."""
DEPTHS = (32, 24, 16, 8, 4)
"""Layers of an 8B model, and of smaller ones to try if memory does not suffice."""


def offload(session: Session) -> None:
    """Train with AdamW on 16k and 32k tokens a step, offloaded and not, from the largest model that fits.

    Every layer is recomputed, so that state is what takes memory.
    """
    torch.set_num_threads(os.cpu_count() or 1)  # the optimizer steps on the host
    start_alone(session.device)
    sizes, depths = (LLAMA_8B, DEPTHS) if session.is_gpu else (REHEARSAL, DEPTHS[-1:])
    one = layers(replace(sizes, layers=1), torch.device("meta"), torch.bfloat16)
    numel = sum(param.numel() for param in one.parameters())
    for name, (where, host_bytes) in OFFLOADED.items():
        session.free()
        free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        for depth in (n for n in depths if n * numel * host_bytes < free_bytes):
            if _fits(session, name, where, replace(sizes, layers=depth)):
                break
    for name, (where, _) in OFFLOADED.items():  # what they cost where all fit
        _fits(session, f"small, {name}", where, replace(sizes, layers=depths[-1]))


def _fits(session: Session, name: str, where: Any, sizes: Sizes) -> bool:
    """Train a few steps on 16k and 32k tokens; return True if memory sufficed for the first.

    Where main weights rest on the host, optimizers step after backward and in it.
    """
    from torch.utils.checkpoint import checkpoint

    from megatron_fsdp import MixedPrecisionPolicy, fully_shard

    session.free()
    fitted = False
    try:
        plain = layers(sizes, session.device, torch.bfloat16)
        numel = sum(param.numel() for param in plain.parameters())
        for layer in plain.children():
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        model, optimizer = fully_shard(
            plain,
            torch.optim.AdamW(plain.parameters(), fused=True),
            fsdp_unit_modules=[Layer],
            mixed_precision_policy=MixedPrecisionPolicy(torch.float32, torch.float32),
            offload=where,
        )
        for tokens in (16384, 32768) if session.is_gpu else sizes.tokens:
            length = min(tokens, 4096)
            x = torch.randn(tokens // length, length, sizes.dim, device=session.device, dtype=torch.bfloat16)
            for in_backward in (False, True) if where == "all" else (False,):
                step = stepping(model, optimizer, x, in_backward)
                step()
                session.finish()
                if session.is_gpu:
                    torch.cuda.reset_peak_memory_stats()
                device_ms, _ = measure(session, step, 3)
                facts: dict[str, Any] = {"parameters": numel, "tokens/s": round(tokens / device_ms * 1e3)}
                if session.is_gpu:
                    facts["peak GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
                facts |= {f"{kind} offloaded, GiB": round(n / 2**30, 3) for kind, n in model.memory().offloaded.items()}
                when = ", stepping in backward" * in_backward
                session.note(f"{name}{when}, {sizes.layers} layers, {tokens} tokens", **facts)
                fitted = True
    except RuntimeError as error:  # torch's OutOfMemoryError, or memory that the host does not pin
        if "out of memory" not in str(error):
            raise
        session.note(f"{name}, {sizes.layers} layers", error=str(error).splitlines()[0][:200])
    return fitted


# ---- running ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Section:
    """A function of a session, and its time limit in seconds."""

    run: Callable[[Session], None]
    limit_s: float
    name: str = ""

    @property
    def label(self) -> str:
        """Its name on the command line."""
        return self.name or self.run.__name__


PARTS: dict[int, tuple[Section, ...]] = {
    1: (
        Section(machine, 30),
        Section(alone, 60),
        Section(formats, 30),
        Section(optimizers, 30),
        Section(offloaded, 30),
        Section(out_of_memory, 40),
        Section(shared_gpu, 90),
        Section(gpu_tests, 180),
    ),
    2: (
        Section(machine, 30),
        Section(world_size_1, 270),
        Section(partial(rank_0_of, 8), 100, "rank_0_of_8"),
        Section(partial(rank_0_of, 64), 100, "rank_0_of_64"),
        Section(unit_graphs, 40),
    ),
    3: (Section(machine, 30), Section(offload, 500)),
}


def run_part(session: Session, seconds: float | None = None) -> int:
    """Run each section in its own process, all within `seconds` (the part's own time); return the failures."""
    failed, end = 0, time.monotonic() + (seconds or PART_S[session.part])
    for section in PARTS[session.part]:
        session.section = section.label
        limit_s = min(section.limit_s, end - time.monotonic())
        if limit_s <= LEAST_S:
            session.note("not run", reason="the part's time is over")
            failed += 1
            continue
        command = [sys.executable, __file__, "--section", section.label, *_arguments(session)]
        begin = time.monotonic()
        process = subprocess.Popen(command, start_new_session=True)
        try:
            code: int | str = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = f"stopped after {limit_s:.0f} s"
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # whatever it has started and left
        process.wait()
        failed += code != 0
        session.note("section", ended=code, seconds=round(time.monotonic() - begin, 1))
    return failed


def _arguments(session: Session) -> list[str]:
    return ["--part", str(session.part), "--out", str(session.out), "--device", session.device.type]


def main() -> int:
    """Run a part or, in a process of a part, a section or a rank."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", type=int, choices=sorted(PARTS), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for results; made if need be")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, help="end the part after so long, whatever is left of it")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--rank-of", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    session = Session(torch.device(given.device), given.out.resolve(), given.part)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if given.rank_of is not None:
        session.section = "shared_gpu"
        rank_of_shared_gpu(session, given.rank, given.rank_of, given.store)
        return 0
    if given.section is None:
        return 1 if run_part(session, given.seconds) else 0
    session.section = given.section
    section = next(each for each in PARTS[given.part] if each.label == given.section)
    try:
        section.run(session)
    except BaseException as error:  # noqa: BLE001 (the part goes on)
        session.note("failed", error=f"{type(error).__name__}: {error}", where=traceback.format_exc().splitlines()[-4:])
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
