"""Tied weights stay tied: the embedding and the output projection are cut the same way, and are one parameter again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from megatron_fsdp.automodel.tensor_parallel.translation import COLWISE, EMBEDDING, LINEAR, ROWWISE
from megatron_fsdp.errors import ConfigurationError


@dataclass(frozen=True)
class Ties:
    """The parameters that several modules own.

    Attributes:
        groups: Names of each such parameter, the first being that of `named_parameters`.
    """

    groups: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, model: nn.Module) -> Ties:
        """Those of a model that is not divided yet."""
        names: dict[int, list[str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(param), []).append(name)
        return cls(tuple(tuple(group) for group in names.values() if len(group) > 1))

    def adapt(self, model: nn.Module, styles: Mapping[str, ParallelStyle | str]) -> dict[str, ParallelStyle | str]:
        """Give a tied embedding the cut of the output projection, or that the one of the embedding if it has none.

        Args:
            model: What the names in `styles` are of.
            styles: Style by name of the module.

        Returns:
            The styles that fit together.
        """
        adapted = dict(styles)
        tied = {id(param): param for group in self.groups for param in [_get(model, group)] if param is not None}
        embeddings: dict[int, list[str]] = {}
        linears: dict[int, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            key = id(getattr(module, "weight", None))
            if key in tied and isinstance(module, nn.Embedding):
                embeddings.setdefault(key, []).append(name)
            elif key in tied and isinstance(module, nn.Linear):
                linears.setdefault(key, []).append(name)
        for key, names in linears.items():
            partners = embeddings.get(key, [])
            _fit(adapted, names, partners)
        return adapted

    def restore(self, model: nn.Module) -> None:
        """Make one parameter of each group again.

        Raises:
            ConfigurationError: A plan of torch's styles cut the weights differently.
        """
        for first, *others in self.groups:
            param = model.get_parameter(first)
            for name in others:
                other = model.get_parameter(name)
                if isinstance(param, DTensor) and isinstance(other, DTensor) and param.placements != other.placements:
                    raise ConfigurationError(
                        f"{first} and {name} are one weight, but the tensor-parallel plan places them as "
                        f"{param.placements} and {other.placements}; give both modules the same cut"
                    )
                owner, _, key = name.rpartition(".")
                model.get_submodule(owner).register_parameter(key, param)


def _get(model: nn.Module, names: tuple[str, ...]) -> nn.Parameter | None:
    every = dict(model.named_parameters(remove_duplicate=False))
    return next((every[name] for name in names if name in every), None)


def _fit(styles: dict[str, ParallelStyle | str], linears: list[str], embeddings: list[str]) -> None:
    """Make the styles of modules with one weight agree; styles of torch are left to the user."""
    by_linear = next(
        (style for name in linears if isinstance(style := styles.get(name), str) and style in LINEAR), None
    )
    by_embedding = next((style for name in embeddings if (style := styles.get(name)) in EMBEDDING | LINEAR), None)
    if by_linear is not None:
        cut = "embedding_rowwise" if by_linear in COLWISE else "embedding_colwise"
        styles.update((name, cut) for name in embeddings if not isinstance(styles.get(name), ParallelStyle))
    elif by_embedding is not None and not any(name in styles for name in linears):
        by_rows = by_embedding in ("embedding_rowwise",) or by_embedding in ROWWISE
        cut = "colwise_gather_output" if by_rows else "rowwise_split_input"
        styles.update((name, cut) for name in linears)
