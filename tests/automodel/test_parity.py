"""Any strategy on any mesh trains as one process does: losses, logits, norms, every gradient and two updates."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from megatron_fsdp.automodel import AutoModelForCausalLM, PipelineConfig
from tests.automodel.training import (
    STRATEGIES,
    assert_trained_alike,
    load,
    managed,
    parameters_of,
    reference,
    strategy,
    train,
)
from tests.conftest import RunRanks
from tests.support.language_models import build
from tests.support.on_ranks import assert_equal_tensors, on_ranks, once


@dataclass(frozen=True)
class Case:
    """One way to divide a model.

    Attributes:
        kind: Of the model, a key of `FAMILIES`.
        sizes: As `from_pretrained` takes them.
        name: Of the strategy.
        fields: Of its config.
        changes: Of the model's config.
        pipeline: Its options.
        rows: Of the batch; or of each data-parallel rank.
        edit: Changes the whole model in place before it is divided, or returns another one.
        loss_inside: The model computes the loss, in place of the loop.
        steps: Updates.
    """

    kind: str
    sizes: dict[str, int]
    name: str = "fsdp2"
    fields: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    pipeline: PipelineConfig | None = None
    rows: Any = 4
    edit: Callable[[Any], Any] | None = None
    loss_inside: bool = False
    steps: int = 2

    def expected(self) -> Any:
        """What one process computes."""
        rows = self.rows if isinstance(self.rows, int) else sum(self.rows)
        return reference(self.kind, steps=self.steps, rows=rows, changes=self.changes, edit=self.edit)


def check(cases: list[Case]) -> None:
    for case in cases:
        model = build(case.kind, **case.changes)
        if case.edit is not None:
            model = case.edit(model) or model
        sharded = managed(strategy(case.name, **case.fields), model, case.pipeline, **case.sizes)
        try:
            run = train(sharded, steps=case.steps, rows=case.rows, loss_inside=case.loss_inside)
            assert_trained_alike(run, case.expected())
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from None


ENGINE = "megatron_fsdp"
TWO_LAYERS = {"num_hidden_layers": 2}
UNTIED = {"tie_word_embeddings": False}
SOFTCAP = {"attn_logit_softcapping": 1.0}
"""So low that scores bend."""

DIVIDED = ("llama", "gemma3", "mistral", "phi3", "qwen2_moe", "deepseek_v3")
"""Gradients of every type that has a plan are in tensor_parallel/test_every_type.py."""

MIXTURES = ("qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss")


def tensors(kind: str, size: int = 2, names: tuple[str, ...] = ("fsdp2",), **changes: Any) -> list[Case]:
    """Tensor parallelism without and with sequence parallelism."""
    return [
        Case(kind, {"tp_size": size}, name, {"sequence_parallel": splits}, {**TWO_LAYERS, **changes})
        for name in names
        for splits in (False, True)
    ]


def experts(kind: str, size: int = 2, changes: dict[str, Any] | None = None, **options: Any) -> Case:
    return Case(kind, {"ep_size": size}, changes={**TWO_LAYERS, **(changes or {})}, **options)


def beside(kind: str, name: str = ENGINE, ep_size: int = 2, edit: Any = None, **sizes: int) -> Case:
    """Experts beside tensor or context parallelism."""
    return Case(kind, {"ep_size": ep_size, **sizes}, name, {}, TWO_LAYERS, edit=edit)


def sequences(kind: str, size: int = 2, **options: Any) -> Case:
    return Case(kind, {"cp_size": size}, **options)


def stages(kind: str, schedule: str = "1f1b", microbatch_size: int = 1, size: int = 2, **options: Any) -> Case:
    return Case(kind, {"pp_size": size}, pipeline=PipelineConfig(schedule, microbatch_size), **options)


def only_experts_of_the_first_rank(model: Any) -> None:
    """Of DeepSeek's two groups of two experts the first is always chosen: that of rank 0 of 2."""
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias[:2] = 10.0


def never_the_last_expert(model: Any) -> None:
    """The last expert has no tokens; the other one of its rank may have some."""
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias[3] = -10.0


def eager(model: Any) -> None:
    """Expert after expert, which is not what transformers does by default."""
    model.config._experts_implementation = "eager"


def eager_on_the_first_rank_only(model: Any) -> None:
    """Computed expert after expert, weights without tokens have no gradient, not even zeros."""
    only_experts_of_the_first_rank(model)
    eager(model)


def frozen_first_weight(model: Any) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_("gate_up_proj" not in name)


def adapted(model: Any) -> Any:
    from tests.automodel.test_adapters import lora, with_adapters

    return with_adapters(model, lora())


def recomputed_by_transformers(model: Any) -> None:
    model.activation_checkpointing_enable({"use_reentrant": True})


UNUSED = {only_experts_of_the_first_rank: [2, 3], eager_on_the_first_rank_only: [2, 3], never_the_last_expert: [3]}
"""Experts without tokens, by what was edited."""

EDGES_OF_EXPERTS = [
    experts("qwen3_moe", rows=(3, 1)),
    experts("mixtral", fields={"activation_checkpointing": True}),
    experts("mixtral", edit=recomputed_by_transformers),
    experts("deepseek_v3", edit=only_experts_of_the_first_rank),
    experts("deepseek_v3", edit=eager_on_the_first_rank_only, fields={"activation_checkpointing": True}),
    experts("deepseek_v3", changes={"topk_group": 2}, edit=never_the_last_expert),
    experts("mixtral", edit=eager),
    experts("qwen2_moe", edit=frozen_first_weight),
]
ALL_SEQUENCES = [*map(sequences, ("llama_gqa", "mistral", "phi", "deepseek_v3")), sequences("gemma2", changes=SOFTCAP)]

TABLE: dict[str, tuple[int, list[Case]]] = {
    **{f"tensors-{kind}": (2, tensors(kind)) for kind in DIVIDED},
    **{f"tensors-{kind}-4": (4, tensors(kind, 4)) for kind in ("gemma3", "mixtral")},
    **{f"tensors-{kind}-sharded": (4, tensors(kind, 2, ("fsdp2", ENGINE))) for kind in ("qwen3_moe", "llama_gqa")},
    "tensors-uneven": (2, tensors("llama", vocab_size=97)),
    "tensors-uneven-sharded": (
        4,
        [
            Case("llama_tied", {"tp_size": 2}, name, {"sequence_parallel": splits}, {**TWO_LAYERS, "vocab_size": 97})
            for name, splits in (("fsdp2", True), (ENGINE, False))
        ],
    ),
    **{f"experts-{kind}": (2, [experts(kind), experts(kind, name=ENGINE, steps=3)]) for kind in MIXTURES},
    **{
        f"experts-{kind}-4": (4, [experts(kind, 4), experts(kind, 2), experts(kind, 2, name=ENGINE, steps=3)])
        for kind in ("mixtral", "gpt_oss")
    },
    "experts-edges": (2, EDGES_OF_EXPERTS),
    "experts-edges-engine": (2, [replace(case, name=ENGINE) for case in EDGES_OF_EXPERTS[::2]]),
    "experts-beside": (
        4,
        [
            beside("deepseek_v3", tp_size=2),
            beside("gpt_oss", cp_size=2),
            beside("mixtral", "fsdp2", tp_size=2),
            beside("mixtral", edit=adapted, tp_size=2),
            beside("mixtral", "fsdp2", cp_size=2),
        ],
    ),
    "experts-strategies": (
        4,
        [
            experts("mixtral", ep, name=ENGINE, fields={"zero_dp_strategy": dense, "zero_dp_strategy_experts": own})
            for ep, dense, own in ((2, 1, 3), (2, 3, 0), (1, 2, 3))
        ],
    ),
    "experts-slices": (4, [experts("qwen3_moe", changes={"num_experts": 6})]),  # 3 are not shared out whole to 2 ranks
    "sequences": (2, ALL_SEQUENCES),
    "sequences-4": (4, [sequences("gpt_oss", 4, changes=TWO_LAYERS, fields={"ulysses_degree": 2})]),
    "sequences-sharded": (4, [sequences("llama_gqa"), sequences("llama_gqa", name=ENGINE)]),
    "sequences-copies": (4, [Case("llama_gqa", {"dp_replicate_size": 2, "cp_size": 2})]),
    "sequences-recomputed": (
        2,
        [
            sequences("mistral", name=ENGINE, fields={"activation_checkpointing": "full"}),
            sequences("mistral", fields={"activation_checkpointing": True}),
        ],
    ),
    "sequences-own-loss": (
        2,
        [sequences("qwen3", loss_inside=True), sequences("llama_gqa", name=ENGINE, loss_inside=True)],
    ),
    "stages": (
        2,
        [
            stages("qwen3_moe", microbatch_size=2),
            stages("gemma3"),  # tied
            stages("gemma3", "interleaved1f1b", changes=UNTIED),
        ],
    ),
    "stages-families": (
        2,
        [
            stages("gemma2", changes=UNTIED),
            stages("granite", changes={"embedding_multiplier": 3.0}),
            stages("gpt2", changes=UNTIED),
            stages("deepseek_v3"),
            stages("gemma3", fields={"activation_checkpointing": True}),
        ],
    ),
    "stages-4": (4, [stages("llama", size=4), stages("gemma2", size=4), stages("mixtral", "gpipe", 2, 4)]),
    "stages-sharded": (
        4,
        [
            stages("llama_gqa"),
            stages("qwen3_moe", fields={"reshard_after_forward": True}),
            stages("gemma3", "interleaved1f1b"),
            stages("llama", "gpipe"),
            stages("llama", "loopedbfs"),
        ],
    ),
}
"""Name -> number of ranks, and what is trained on them one after another."""

SHORT = ["tensors-uneven-sharded", "experts-qwen2_moe", "sequences-copies", "sequences-own-loss", "stages"]


@pytest.mark.full(short=SHORT)
@pytest.mark.parametrize(("num_ranks", "cases"), TABLE.values(), ids=TABLE)
@on_ranks()
def test_ranks_train_as_one_process(cases: list[Case]) -> None:
    for case in cases:
        if case.edit in UNUSED:
            gradient = case.expected().gradients[0]["model.layers.1.mlp.experts.down_proj"]
            assert [e for e in range(4) if not gradient[e].any()] == UNUSED[case.edit]
    check(cases)


def losses_on_gpu(folder: Path, name: str) -> tuple[list[float], set[str]]:
    model = load(folder, name, dtype="float32", backend="nccl")
    return train(model, steps=3).losses, {param.device.type for param in model.parameters()}


@pytest.mark.gpu
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_trains_on_a_gpu_as_one_process_on_the_cpu(run_ranks: RunRanks, tmp_path: Path, name: str) -> None:
    build("llama").save_pretrained(tmp_path)
    ((losses, devices),) = run_ranks(1, losses_on_gpu, tmp_path, name, device_type="cuda")
    assert devices == {"cuda"}
    assert losses == pytest.approx(reference("llama").losses, rel=1e-3)


FILES: dict[str, tuple[int, Case]] = {
    "tensors-engine": (2, Case("olmo2", {"tp_size": 2}, ENGINE)),
    "tensors-sharded": (4, Case("qwen3_moe", {"tp_size": 2}, ENGINE)),
    "sequences-ulysses": (2, Case("llama_gqa", {"cp_size": 2}, ENGINE, {"ulysses_degree": 2})),
    "sequences-engine": (4, Case("llama_tied", {"cp_size": 2}, ENGINE, {"activation_checkpointing": True})),
    "stages": (2, Case("gemma3", {"pp_size": 2}, pipeline=PipelineConfig("interleaved1f1b"))),
    "stages-sharded": (4, Case("llama_tied", {"pp_size": 2})),
    "experts-first-dense": (2, Case("deepseek_v3", {"ep_size": 2}, fields={"activation_checkpointing": True})),
    "experts-slices": (4, Case("mixtral", {"ep_size": 2}, changes={**TWO_LAYERS, "num_local_experts": 6})),
    "experts-engine": (4, Case("gpt_oss", {"ep_size": 2}, ENGINE, {"activation_checkpointing": "full"})),
    "experts-engine-beside": (4, Case("deepseek_v3", {"ep_size": 2, "tp_size": 2}, ENGINE)),
    "copies": (4, Case("llama", {"dp_replicate_size": 2})),
    **{f"{name}-{kind}": (2, Case(kind, {}, name)) for name in STRATEGIES for kind in ("phi3", "gemma3", "qwen2_moe")},
    **{f"engine-{kind}": (2, Case(kind, {}, ENGINE)) for kind in ("llama_tied", "gpt2", "gpt_oss", "deepseek_v3")},
    **{f"{name}-{ranks}": (ranks, Case("llama_tied", {}, name)) for name in STRATEGIES for ranks in (1, 4)},
}


@pytest.mark.full(short=["experts-slices", *(f"{name}-phi3" for name in STRATEGIES)])
@pytest.mark.parametrize(("num_ranks", "case"), FILES.values(), ids=FILES)
@on_ranks()
def test_files_are_read_into_any_mesh_and_written_whole(tmp_path: Path, case: Case) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    most = "5GB" if case.sizes else "20KB"  # one file, or several
    once(lambda: build(case.kind, **case.changes).save_pretrained(source, max_shard_size=most))
    options = {"pipeline_config": case.pipeline, "dtype": "float32", **case.sizes}
    config = strategy(case.name, **case.fields)
    model = AutoModelForCausalLM.from_pretrained(str(source), distributed_config=config, **options)
    assert_trained_alike(train(model, steps=1), case.expected())
    model.save_pretrained(target, max_shard_size="20KB")
    again = transformers.AutoModelForCausalLM.from_pretrained(target, dtype="float32")
    assert_equal_tensors(dict(again.named_parameters()), parameters_of(model))
    assert again.config.architectures == transformers.AutoConfig.from_pretrained(source).architectures
