"""Full passes: the tensors that files have, in one order on all ranks, within a bucket."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from megatron_fsdp import MixedPrecisionPolicy, fsdp2, fully_shard_model
from megatron_fsdp.checkpoint.hf import save_hf
from megatron_fsdp.errors import ConfigurationError, RankError, ScheduleError
from megatron_fsdp.weights import WeightSource
from tests.checkpoint.hf.hf_models import build, same_tensors, shard, stored, tokens, trained
from tests.support.arrangements import divide_tensors, hybrid_arguments, tensor_parallel
from tests.support.case import shard as shard_case
from tests.support.counting import LiveBytes, OpCounts, held_bytes
from tests.support.doors import in_buckets, in_place, one_by_one, ring
from tests.support.experts import FLAT, Experts, ExpertsKind, ListedExperts, build_with_experts, experts_of
from tests.support.on_ranks import fixed_seed, of_ranks, on_ranks, refusal, same_on_ranks
from tests.support.zoo import MODEL_CASES, Batch, Block, TinyTransformer

BF16_FP32 = MixedPrecisionPolicy(main_params_dtype=torch.float32)


def batch_of(seed: int) -> Batch:
    """This rank's part of a batch."""
    whole = MODEL_CASES["transformer"].make_batch(12, torch.Generator().manual_seed(seed))
    return whole.part(dist.get_rank(), dist.get_world_size())


def trained_kind(kind: str, strategy: int, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """A sharded model after a step; one that computes in bfloat16 has main weights in float32."""
    plain = build(kind).to(dtype)
    units = [type(plain.model.layers[0])] if hasattr(plain, "model") else None
    return trained(plain, strategy, fsdp_unit_modules=units, mixed_precision_policy=BF16_FP32, **options)[0]


def check_against_files(model: nn.Module, folder: Path, **arguments: Any) -> None:
    """A pass is what `save_hf` writes, key for key, and what the metadata says."""
    source = WeightSource(model, **arguments)
    found = list(source)
    save_hf(model, folder, dtype=arguments.get("dtype", torch.bfloat16))
    assert same_tensors(dict(found), stored(folder))  # type: ignore[arg-type]
    assert [(name, t.dtype, tuple(t.shape), t.is_contiguous()) for name, t in found if t is not None] == [
        (meta.name, meta.dtype, meta.shape, True) for meta in same_on_ranks(source.metadata())
    ]


@pytest.mark.parametrize(
    ("kind", "num_ranks", "strategy", "dtype", "bucket_bytes"),
    [
        ("llama", 2, 3, torch.bfloat16, 700),
        ("gpt2", 3, 1, torch.bfloat16, 2**28),
        ("mixtral", 2, 2, torch.bfloat16, 3000),
        ("qwen_moe", 4, 3, torch.float32, 5000),
        ("qwen_moe", 1, 0, torch.float32, 5000),
    ],
)
@on_ranks()
def test_a_pass_is_what_files_have(
    tmp_path: Path, kind: str, strategy: int, dtype: torch.dtype, bucket_bytes: int
) -> None:
    hybrid = hybrid_arguments(2, 2) | {"outer_dp_sharding_strategy": 1} if dist.get_world_size() == 4 else {}
    check_against_files(trained_kind(kind, strategy, dtype, **hybrid), tmp_path / "out", bucket_bytes=bucket_bytes)


# ---- whatever has sharded the model ----------------------------------------------------------------------------------


def by_our_ddp(model: nn.Module) -> nn.Module:
    return in_buckets(model, {"use_distributed_optimizer": True, "bucket_size": 900})


def by_place(model: Any) -> nn.Module:
    return in_place(*model.model.layers, model)


def by_torch(model: Any) -> nn.Module:
    return one_by_one(torch_fully_shard, *model.model.layers, model, mesh=ring())


def by_torchs_door(model: Any) -> nn.Module:
    one_by_one(fsdp2.fully_shard, *model.model.layers, model)(input_ids=tokens())  # cuts the parameters anew
    return model


def plain(model: nn.Module) -> nn.Module:
    return model


WAYS = [by_our_ddp, by_place, by_torchs_door, by_torch, nn.parallel.DistributedDataParallel, plain]


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_every_way_of_sharding_gives_the_same_tensors_in_the_same_order(way: Callable[[nn.Module], nn.Module]) -> None:
    """The order does not depend on groups, units or strategies."""
    model = build("mixtral")
    wanted = list(WeightSource(model, bucket_bytes=10**9))
    assert len(wanted) == len(dict(wanted)) == 41
    model = way(model)
    for destination in ("all", 1, "spread"):
        source = WeightSource(model, bucket_bytes=2000, destination=destination)
        found, held = list(source), source.held_names()
        assert [name for name, _ in found] == [name for name, _ in wanted]
        mine = {name: tensor for name, tensor in wanted if held is None or name in held}
        assert same_tensors({name: tensor for name, tensor in found if tensor is not None}, mine)  # type: ignore[arg-type]
        assert sum(of_ranks(len(mine))) == (82 if destination == "all" else 41)
    for _, tensor in WeightSource(model, dtype=None):  # copies, also where nothing is cast or gathered
        assert tensor is not None
        tensor.zero_()
    assert same_tensors(dict(WeightSource(model)), dict(wanted))  # type: ignore[arg-type]


def on_two_dimensions(kind: ExpertsKind | None) -> tuple[dict[str, Tensor], nn.Module]:
    """Weights, and the model that has them, with tensor-parallel ranks, or with ranks that divide its experts."""
    with fixed_seed(0):
        model = TinyTransformer() if kind is None else build_with_experts(kind=kind)
    wanted = {name: param.detach().clone() for name, param in model.named_parameters()}
    divided = tensor_parallel(divide_tensors) if kind is None else experts_of(FLAT)
    divided.place(model)
    return wanted, fully_shard_model(model, fsdp_unit_modules=[Block], **divided.arguments())


@pytest.mark.full(short=["None", "ListedExperts"])
@pytest.mark.parametrize("kind", [None, Experts, ListedExperts])
@on_ranks(4)
def test_parts_of_all_ranks_are_put_together_under_their_global_names(kind: ExpertsKind | None) -> None:
    wanted, sharded = on_two_dimensions(kind)
    cast = {name: tensor.bfloat16() for name, tensor in wanted.items()}
    assert same_tensors(dict(WeightSource(sharded, bucket_bytes=3000)), cast)  # type: ignore[arg-type]
    for destination in ("all", 3, "spread"):
        source = WeightSource(sharded, dtype=None, bucket_bytes=2000, destination=destination)
        found, held = dict(source), source.held_names()
        assert found.keys() == wanted.keys()
        held = found.keys() if held is None else held
        assert {name for name, tensor in found.items() if tensor is not None} == set(held)
        assert same_tensors({name: found[name] for name in held}, {name: wanted[name] for name in held})  # type: ignore[misc]
        union = {name for names in of_ranks(sorted(held)) for name in names}
        assert union == wanted.keys()


# ---- names -----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_names_dtypes_and_tensors_are_chosen() -> None:
    model = trained_kind("qwen_moe", 3)
    split = dict(WeightSource(model))
    fused = dict(WeightSource(model, experts="fused", tied="all"))
    layer = "model.layers.1.mlp.experts"
    assert fused.keys() - split.keys() == {
        *(f"model.layers.{at}.mlp.experts.{kind}_proj" for at in range(2) for kind in ("gate_up", "down")),
        "lm_head.weight",
    }
    assert torch.equal(fused["lm_head.weight"], split["model.embed_tokens.weight"])  # type: ignore[arg-type]
    gate_up = fused[f"{layer}.gate_up_proj"]
    parts = [split[f"{layer}.0.{kind}_proj.weight"] for kind in ("gate", "up")]
    assert gate_up is not None
    assert torch.equal(gate_up[0], torch.cat(parts))  # type: ignore[arg-type]
    own = WeightSource(model, names="model", dtype={"norm": torch.float32}, include="norm|down_proj")
    dtypes = {meta.name: meta.dtype for meta in own.metadata()}
    assert set(dtypes) == {name for name, _ in model.module.named_parameters() if "norm" in name or "down_proj" in name}
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == {n for n in dtypes if "norm" in n}
    renamed = WeightSource(model, names={"^model": "language_model"}, include=lambda name: "embed" in name)
    assert renamed.update_info() == {
        "names": ["language_model.embed_tokens.weight"],
        "dtype_names": ["bfloat16"],
        "shapes": [[41, 16]],
    }


@on_ranks(2)
def test_layers_come_one_after_another_in_the_order_of_numbers() -> None:
    source = WeightSource(shard(build("llama", num_hidden_layers=12)), bucket_bytes=2000)
    groups = source.groups()
    assert [group[0].split(".")[1:3] for group in groups[1:]] == [["layers", str(at)] for at in range(12)]
    assert [name for group in groups for name in group] == [meta.name for meta in source.metadata()]
    by_group, one_by_one = list(source.iter_groups()), dict(source)
    assert [names for names, _ in by_group] == groups
    assert all(torch.equal(t, one_by_one[name]) for names, ts in by_group for name, t in zip(names, ts, strict=True))  # type: ignore[arg-type]
    assert source.num_tensors == len(one_by_one)
    assert (source.nbytes, source.largest) == (2 * sum(t.numel() for t in one_by_one.values() if t is not None), 1312)


# ---- the engine's own rules ------------------------------------------------------------------------------------------


@pytest.mark.full(short=["1"])
@pytest.mark.parametrize("destination", ["all", 1])
@on_ranks(3)
def test_the_peak_is_a_bucket_and_a_tensor_and_nothing_where_nothing_is_received(destination: int | str) -> None:
    """Layers of 50 times the bucket; casts before the gather, so that buckets are in the dtype of the wire."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(50)))
    tensor = 64 * 64 * 2
    source = WeightSource(
        fully_shard_model(model, fsdp_unit_modules=[nn.Linear]), destination=destination, bucket_bytes=2 * tensor
    )
    source.metadata()
    before = held_bytes()
    for _ in range(3):
        with OpCounts() as counts, LiveBytes() as live:
            for _name, _tensor in source:
                pass
        del _tensor
    is_held = destination in ("all", dist.get_rank())
    sent_late = tensor  # a thread of gloo lets go of what it has sent a moment later
    assert live.peak_bytes <= (3 * tensor if is_held else tensor) + sent_late + 4096
    assert live.peak_bytes >= (2 * tensor if is_held else 1)
    assert held_bytes() == before
    assert sum(sent.num_bytes for sent in counts.sent) < 50 * tensor + 52 * 64  # half of what float32 would be


@on_ranks(2)
def test_metadata_sends_no_weights() -> None:
    model = trained_kind("llama", 3)
    before = model.traffic().copy() if callable(getattr(model, "traffic", None)) else None
    with OpCounts() as counts:
        WeightSource(model).metadata()
    assert before is None or model.traffic() == before
    assert {sent.name for sent in counts.sent} <= {"allgather_", "_allgather_base_"}
    assert sum(sent.num_bytes for sent in counts.sent) <= 4096


@on_ranks(2)
def test_what_was_yielded_keeps_its_bits_and_is_no_part_of_the_model() -> None:
    model, other = trained_kind("gpt2", 1, torch.bfloat16), trained_kind("gpt2", 1, torch.bfloat16)
    source = WeightSource(model, bucket_bytes=2000)
    kept = list(source)
    copies = {name: tensor.clone() for name, tensor in kept if tensor is not None}
    for _name, tensor in source:
        assert tensor is not None
        tensor.fill_(7.0)
    losses = [each(input_ids=tokens(), labels=tokens()).loss for each in (model, other)]
    assert losses[0].item() == losses[1].item()
    losses[0].backward()
    list(source)
    assert same_tensors(dict(kept), copies)  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", [0, 2, 3])
@on_ranks(2)
def test_passes_change_nothing_and_cost_no_gather_of_their_own(strategy: int) -> None:
    """Strategies 1 and 2 gather for a pass what the next forward would gather anyway."""
    runs = []
    for has_passes in (False, True):
        with fixed_seed(0):
            model, optimizer = shard_case(MODEL_CASES["transformer"], zero_dp_strategy=strategy)
        source, found, gathers = WeightSource(model, dtype=None), [], []
        source.metadata()
        for step in range(4):
            with OpCounts() as counts:
                passed = dict(source) if has_passes else model.full_parameters()
                loss = MODEL_CASES["transformer"].loss(model, batch_of(step))
            gathers.append(counts.collectives.gathers)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found += [loss.item(), passed]
        runs.append((found, gathers))
    for one, other in zip(runs[0][0], runs[1][0], strict=True):
        assert one == other if isinstance(one, float) else same_tensors(one, other)  # type: ignore[arg-type]
    states = 2  # ranks exchange one before the bucket and one at the end
    assert runs[1][1][1:] == [states + {0: 0, 2: 4, 3: 8}[strategy]] * 3


@pytest.mark.parametrize("strategy", [1, 3])
@on_ranks(2)
def test_a_write_to_main_weights_that_nobody_announced_is_in_the_next_pass(strategy: int) -> None:
    model: Any = trained_kind("gpt2", strategy, torch.bfloat16)
    source = WeightSource(model)
    list(source)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    wanted = {name: tensor.bfloat16() for name, tensor in model.full_parameters().items()}
    assert same_tensors(dict(source), wanted)  # type: ignore[arg-type]


def refuse(words: str, call: Callable[[], object]) -> None:
    with pytest.raises(ScheduleError, match=words) as raised:
        call()
    same_on_ranks(str(raised.value))


@on_ranks(2)
def test_nothing_else_of_the_model_happens_during_a_pass(tmp_path: Path) -> None:
    model, optimizer = shard_case(MODEL_CASES["transformer"])
    loss = MODEL_CASES["transformer"].loss
    loss(model, batch_of(0)).backward()
    source = WeightSource(model, bucket_bytes=500)
    begun = iter(source)
    next(begun)
    is_open = "while an iteration of WeightSource is open"
    refuse(is_open, lambda: model(batch_of(0).inputs))
    refuse(is_open, optimizer.step)
    refuse(is_open, model.finish_grad_sync)
    refuse(is_open, lambda: save_hf(model, tmp_path / "out"))
    refuse(is_open, lambda: next(iter(source)))
    refuse(is_open, lambda: model.full_parameters_context().__enter__())
    rest = dict(begun)
    assert len(rest) == source.num_tensors - 1
    with torch.no_grad():
        next(begun := iter(source))
        model.module.blocks[2].mlp.down.weight.add_(1)
    refuse("was written to while", lambda: list(begun))
    optimizer.step()
    assert loss(model, batch_of(1)).isfinite()
    with model.full_parameters_context():
        pass

    model.module.blocks[1].register_forward_pre_hook(lambda *_: refuse("inside a forward", lambda: next(iter(source))))
    loss(model, batch_of(1))


def raises() -> None:
    raise ValueError("the engine is gone")


@pytest.mark.parametrize("way", ["raises", "breaks"])
@on_ranks(3)
def test_a_rank_that_stops_in_the_middle_is_named_and_training_goes_on(way: str) -> None:
    model, optimizer = shard_case(MODEL_CASES["transformer"])
    source = WeightSource(model, bucket_bytes=500)
    version, error = source.version, None
    try:
        for at, _ in enumerate(source):
            if dist.get_rank() == 1 and at == 3:
                if way == "raises":
                    raises()
                break
    except (ValueError, RankError) as met:
        error = met
    if dist.get_rank() == 1:
        assert isinstance(error, ValueError) == (way == "raises")
        del error
    else:
        assert isinstance(error, RankError)
        assert "rank 1: RankError: stopped iterating before the end" in str(error)
    MODEL_CASES["transformer"].loss(model, batch_of(0)).backward()
    optimizer.step()
    assert len(list(source)) == source.num_tensors
    assert source.version == version + 1


@on_ranks(2)
def test_what_cannot_be_sent_is_refused_on_all_ranks() -> None:
    model, here = trained_kind("llama", 3), dist.get_rank()

    def refused(words: str, **arguments: Any) -> None:
        message = refusal(lambda: WeightSource(model, **arguments).metadata(), error=ConfigurationError)
        assert re.search(words, message), message

    refused("tied='twice' is unknown; give 'once' or 'all'", tied="twice")
    refused("names='hugging' is unknown; give 'hf' or 'model'", names="hugging")
    refused("dtype=torch.int8 is no floating-point torch.dtype", dtype=torch.int8)
    refused("bucket_bytes=0 leaves no room", bucket_bytes=0)
    refused("destination=2 is no rank of the group; give 0 to 1", destination=2)
    refused("include='nothing' leaves no tensor", include="nothing")
    refused("names gives 'model.*' and 'model.*' the same name 'x'", names=lambda _: "x")
    refused("names .* is no set of regular expressions", names={"(": "x"})
    refused(r"include has '\(', which is no regular expression: missing", include="(")
    refused("dtype has 3, which is no regular expression: first argument must be", dtype={3: torch.float32})
    # Those that decide on collectives are compared before the first of them.
    refused("ranks differ: bucket_bytes is 100 on rank 0, 101 on rank 1", bucket_bytes=100 + here)
    refused("ranks differ: values is main on rank 0, computed on rank 1", values=("main", "computed")[here])
    refused("ranks differ: destination is all on rank 0, 0 on rank 1", destination=("all", 0)[here])
    refused("ranks differ: names, dtypes and shapes is", include=lambda name: str(here) in name)
    alone = [dist.new_group([rank]) for rank in range(2)]
    with pytest.raises(
        ConfigurationError, match=rf"group has the ranks \[{here}\], and the model is on .*{1 - here}\]"
    ):
        WeightSource(model, group=alone[here])
    with pytest.raises(ConfigurationError, match=r"group has the ranks \[\], and the model"):
        WeightSource(model, group=alone[1 - here])
    model = trained_kind("mixtral", 3)
    without_layer = {r"model\.layers\.0\.block_sparse_moe\.": ""}
    refused("the names do not follow the model's layers", names=without_layer, include="^experts")
    on_meta = nn.Linear(2, 2, device="meta")
    assert "weight is on the meta device; initialise" in refusal(lambda: WeightSource(on_meta).metadata())
    packed = nn.Linear(2, 2)
    packed.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.uint8), requires_grad=False)
    assert "a quantised weight without a dense value" in refusal(lambda: WeightSource(packed).metadata())
    assert "model is a dict; give an nn.Module" in refusal(WeightSource, {})
