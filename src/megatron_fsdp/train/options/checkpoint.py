"""The options about checkpoints; Megatron-LM's names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class CheckpointOptions:
    """Saving a run, and going on from what was saved.

    Attributes:
        save: Folder for checkpoints: one at the end, and one when the run is interrupted (Ctrl-C, SIGTERM). Ranks that
            are started again (`torchrun --max-restarts`) go on from the latest one by themselves.
        save_interval: Save after every so many steps, too.
        keep_last: How many checkpoints to keep; default: all.
        async_save: Write checkpoints while training goes on.
        no_save_optim: Save no optimizer state.
        no_save_rng: Save no random states.
        load: Go on from the latest checkpoint in this folder, or from this checkpoint. May be the folder of `--save`,
            which then need not hold one yet.
        finetune: Load weights only, and begin at step 0; --save is another folder.
        no_load_optim: Load no optimizer state: the optimizer begins anew.
        no_load_rng: Load no random states.
        strict_fsdp_dtensor_load: Refuse a checkpoint that does not fit, in place of loading what fits.
        verify_integrity: Compare everything in a checkpoint with its checksums before it is loaded; those that it
            has, or where the flag is given, those that it must have.
        ckpt_format: Only fsdp_dtensor is written and read here.
        dump_param_to_param_group_map: Write which parameter group each parameter belongs to into this folder, for the
            converter.
    """

    save: Path | None = None
    save_interval: int | None = None
    keep_last: int | None = None
    async_save: bool = False
    no_save_optim: bool = False
    no_save_rng: bool = False
    load: Path | None = None
    finetune: bool = False
    no_load_optim: bool = False
    no_load_rng: bool = False
    strict_fsdp_dtensor_load: bool = True
    verify_integrity: bool = True
    ckpt_format: Literal["torch", "torch_dist", "torch_dcp", "fsdp_dtensor"] = "fsdp_dtensor"
    dump_param_to_param_group_map: Path | None = None

    @property
    def is_same_folder(self) -> bool:
        """Whether there is one folder to load from and to save to, as of a job that is started again and again."""
        return self.save is not None and self.load is not None and self.save.resolve() == self.load.resolve()
