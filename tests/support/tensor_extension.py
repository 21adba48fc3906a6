"""A tensor class of codes and a scale, as quantised weights of libraries are."""

from typing import Any, Self

import torch


class Coded(torch.Tensor):
    """Codes, and a scale for all or for each row; float32 to look at."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls: type[Self], codes: torch.Tensor, scale: torch.Tensor) -> Self:
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, _context: None, _size: Any, _stride: Any) -> Self:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        whole = [each.decoded() if isinstance(each, cls) else each for each in args]
        return func(*whole, **(kwargs or {}))

    def decoded(self) -> torch.Tensor:
        return self.codes.float() * self.scale
