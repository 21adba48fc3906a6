"""The options of a run about its checkpoints; names as in Megatron-LM where it has them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from megatron_fsdp.errors import ConfigurationError

_Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclass(frozen=True)
class CheckpointArguments:
    """Saving a run, and going on from what was saved."""

    save: Path | None = None
    """Folder for checkpoints: one at the end, and one when the run is interrupted (Ctrl-C, SIGTERM)."""
    save_interval: int | None = None
    """Save after every so many steps, too."""
    keep_last: int | None = None
    """How many checkpoints to keep; default: all."""
    async_save: _Flag = False
    """Write checkpoints while training goes on."""
    no_save_optim: _Flag = False
    """Save no optimizer state."""
    no_save_rng: _Flag = False
    """Save no random states."""
    load: Path | None = None
    """Go on from the latest checkpoint in this folder, or from this checkpoint. May be the folder of --save, which then
    need not hold one yet."""
    no_load_optim: _Flag = False
    """Load no optimizer state: the optimizer begins anew."""
    no_load_rng: _Flag = False
    """Load no random states."""
    no_strict_fsdp_dtensor_load: _Flag = False
    """Load what fits, and say what does not, instead of refusing a checkpoint that does not fit."""
    verify_integrity: _Flag = False
    """Compare everything in a checkpoint with its checksums before it is loaded."""
    dump_param_to_param_group_map: Path | None = None
    """Write which parameter group each parameter belongs to into this folder, for the converter."""
    ckpt_format: Literal["torch", "torch_dist", "torch_dcp", "fsdp_dtensor"] = "fsdp_dtensor"
    """Only fsdp_dtensor is written and read here."""


def check_checkpoint_arguments(arguments: CheckpointArguments) -> None:
    """Check that the options can be used, and belong together.

    Raises:
        ConfigurationError: One cannot; names the option, what was given and what is allowed.
    """
    for name in ("save_interval", "keep_last"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigurationError(f"{_option(name)} {value} is not possible: give 1 or more")
    for needed in ("save", "load"):
        given = [name for name in _NEEDS[needed] if getattr(arguments, name)]
        if given and getattr(arguments, needed) is None:
            raise ConfigurationError(
                f"{_option(given[0])} does nothing without --{needed} FOLDER: give both or neither"
            )
    if arguments.ckpt_format != "fsdp_dtensor":
        raise ConfigurationError(
            f"--ckpt-format {arguments.ckpt_format} is not written or read in training: leave it at fsdp_dtensor, and "
            "convert a torch_dist checkpoint first with tools/checkpoint/checkpoint_inspector.py"
        )


_NEEDS = {
    "save": ("save_interval", "keep_last", "async_save", "no_save_optim", "no_save_rng"),
    "load": ("no_load_optim", "no_load_rng", "no_strict_fsdp_dtensor_load", "verify_integrity"),
}


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
