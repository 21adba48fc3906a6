"""Muon on paper: the balance of published models, memory to the byte, and what a plan says of it."""

import pytest
import torch
from torch import nn

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.optim.optimizer import count_kinds, kinds_of
from megatron_fsdp.plan import plan
from megatron_fsdp.plan.machine import find_machine
from megatron_fsdp.plan.models import PRESETS
from megatron_fsdp.plan.muon import muon_matrices, muon_work
from tools.pages import BALANCED_RANKS, balance_rows


class Words(nn.Module):
    """An embedding, two matrices of which one stands for a stack, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.middle = nn.Linear(4, 4)
        self.stack = nn.Parameter(torch.empty(3, 4, 2))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.norm(self.middle(self.words(words)) @ self.stack[0] @ self.stack[1].T)
        return self.head(hidden).sum()


def test_embeddings_head_norms_and_biases_are_left_to_the_other_optimizer() -> None:
    with torch.device("meta"):
        assert muon_matrices(Words()) == {"middle.weight": (4, 4), "stack": (3, 4, 2)}


def test_heads_of_transformers_are_those_that_models_name() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    with torch.device("meta"):
        llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, intermediate_size=64, **sizes))
        gpt2 = transformers.GPT2Model(
            transformers.GPT2Config(vocab_size=96, n_positions=32, n_embd=32, n_layer=1, n_head=4)
        )
        tower = nn.ModuleDict({"text": gpt2, "project": nn.Linear(32, 32, bias=False)})
        alike = transformers.BertForSequenceClassification(
            transformers.BertConfig(vocab_size=64, type_vocab_size=4, num_labels=4, intermediate_size=64, **sizes)
        )
    assert "head 1" in count_kinds(llama.parameters(), llama)
    assert "matrices 14" in count_kinds(llama.parameters(), llama)
    assert kinds_of([tower["project"].weight], tower) == ["matrices"]  # as wide as there are positions
    assert kinds_of([alike.classifier.weight], alike) == ["matrices"]  # as wide as there are types


def test_a_stack_counts_as_its_matrices() -> None:
    work = muon_work([(2, 4, 8), (4, 8)], 2)
    one = 5 * (4 * 4 * 4 * 8 + 2 * 4**3)
    assert (work.matrices, work.numel, work.flops, work.busiest_flops) == (3, 96, 3 * one, 2 * one)
    assert (work.imbalance, work.sent_bytes, work.largest_numel) == (4 / 3, 4 * 96 / 2, 32)


def test_results_go_to_all_replicas() -> None:
    config = {**PRESETS["llama-3-8b"], "num_hidden_layers": 2}
    for arguments, replicas in (({}, 2), ({"outer_strategy": "optim"}, 1), ({"strategy": 0}, 4)):
        work = plan(config, {"dp_outer": 2, "dp_shard": 2}, optimizer="muon", **arguments).model.muon
        assert work is not None
        assert (work.ranks, work.replicas, work.sent_bytes) == (4, replicas, 2 * (1 + replicas) * work.numel / 4)


def test_published_models_are_shared_evenly_where_whole_matrices_can_be() -> None:
    """Work at most 1.05 of the mean but for Llama's few matrices; bytes at most 1.01, unless owners have few each."""
    rows = {name: " ".join(cells) for name, _, *cells in balance_rows()}
    assert BALANCED_RANKS == (8, 64, 128, 256, 512, 1024)
    assert rows == {
        "Llama-3 8B": "1.00 / 1.00 1.06* / 1.04 1.06* / 1.04 2.11* / 1.58 4.23* / 2.65 8.45* / 4.81",
        "Llama-3 70B": "1.00 / 1.00 1.01 / 1.00 1.01 / 1.00 1.17 / 1.06 1.70* / 1.38 3.41* / 2.26",
        "DeepSeek-V3": "1.00 / 1.00 1.00 / 1.00 1.00 / 1.01 1.00 / 1.01 1.00 / 1.03 1.00 / 1.05",
        "Kimi K2": "1.00 / 1.00 1.00 / 1.00 1.00 / 1.00 1.00 / 1.00 1.00 / 1.01 1.00 / 1.01",
    }


@pytest.mark.full
def test_memory_is_one_value_for_matrices_and_two_for_the_others() -> None:
    config = {**PRESETS["llama-3-8b"], "num_hidden_layers": 2}
    plans = [
        [plan(config, 2, optimizer=kind, sequence_length=512, device_rank=rank) for kind in ("muon", "adamw")]
        for rank in range(2)
    ]
    muon, adamw = plans[0]
    matrices = list(muon_matrices(muon.workload.module).values())
    numel = sum(rows * columns for rows, columns in matrices)
    saved = sum(other.memory.optimizer - one.memory.optimizer for one, other in plans)
    assert saved == 4 * numel + 2 * 4 * len(matrices)  # and the counters of steps
    work = muon.model.muon
    assert work is not None
    assert (work.matrices, work.ranks, work.sent_bytes) == (14, 2, 4 * numel / 2)
    assert muon.step.seconds - adamw.step.seconds == pytest.approx(work.seconds(find_machine("h100")))
    assert adamw.model.muon is None
    assert adamw.notes == ()
    (note,) = muon.notes
    assert note.startswith("Muon: 14 matrices, the busiest of 2 ranks has 1.00 of the mean; ")
    assert "MiB sent by a rank; 5 % of compute at " in note


def test_axes_that_divide_matrices_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="leave tp, pp and ep at 1"):
        plan("llama-3-8b", {"dp_shard": 4, "tp": 2}, optimizer="muon")
