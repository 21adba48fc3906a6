"""Which parameters go to which optimizer, as it is logged and described."""

import logging

import torch
from torch import Tensor, nn

from megatron_fsdp import fully_shard_model, fully_shard_optimizer
from megatron_fsdp.optim.routes import count_kinds, route_line
from tests.conftest import RunRanks
from tests.support.api_net import mesh


class Words(nn.Module):
    """A small language model without attention. (samples, tokens) -> (samples, tokens, 11)."""

    def __init__(self, ties: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(2)])
        self.stack = nn.Parameter(torch.ones(2, 4, 4))
        self.scale = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 11, bias=False)
        if ties:
            self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        hidden: Tensor = self.words(words) * self.scale
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden @ self.stack[0])  # type: ignore[no-any-return]


def test_parameters_are_counted_by_what_they_are() -> None:
    model = Words()
    assert count_kinds(model.parameters(), model.modules()) == (
        "norms 4",
        "matrices 2",
        "biases 2",
        "stacks of matrices 1",
        "vectors 1",
        "embeddings 1",
        "head 1",
    )
    tied = Words(ties=True)
    assert count_kinds([tied.head.weight], tied.modules()) == ("embeddings 1",)
    assert count_kinds([torch.ones(2, 2), torch.ones(2)], ()) == ("matrices 1", "vectors 1")


def test_an_optimizer_over_all_of_whole_weights_is_called_replicated() -> None:
    model = nn.Linear(2, 2)
    assert route_line(torch.optim.LBFGS(model.parameters()), model.modules()) == (
        "LBFGS: 2 parameters on whole tensors, the same on every rank (matrices 1, biases 1)"
    )


def connect_two() -> tuple[list[str], list[tuple[str, str, tuple[str, ...]]], list[tuple[str, ...]]]:
    """What is logged, what is described, and the notices after one and after two optimizers."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megatron_fsdp")
    usual = logger.level
    model = fully_shard_model(Words(), mesh(), fsdp_unit_modules=[nn.Sequential])
    matrices = [param for name, param in model.named_parameters() if name.endswith("1.weight")]
    others = [param for name, param in model.named_parameters() if not name.endswith("1.weight")]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        muon = fully_shard_optimizer(torch.optim.Muon(matrices))
        notices = [model.describe().notices]
        adamw = fully_shard_optimizer(torch.optim.AdamW(others))
        notices.append(model.describe().notices)
        assert fully_shard_optimizer(adamw) is adamw  # again: nothing more is said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(usual)
    del muon
    told = model.describe().optimizers
    return logged, sorted((each.class_name, each.step, each.parts) for each in told), notices


def test_what_is_routed_where_is_logged_once_and_described(run_ranks: RunRanks) -> None:
    first, second = run_ranks(2, connect_two)
    rest = ("norms 4", "biases 2", "stacks of matrices 1", "vectors 1", "embeddings 1", "head 1")
    assert first[0] == [
        "Muon: 2 parameters on shards and whole matrices (Muon) (matrices 2)",
        f"AdamW: 10 parameters on local tensors ({', '.join(rest)})",
    ]
    assert second[0] == []
    assert first[1:] == second[1:]
    assert first[1][0] == ("AdamW", "on local tensors", rest)
    assert first[2] == [(f"no connected optimizer updates 10 parameters ({', '.join(rest)})",), ()]
