"""`mfsdp doctor`: compare training of a sharded model with training in one process, and diagnose the difference."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_fsdp.cli.output import add_json, write_json, write_line
from megatron_fsdp.config.command_parser import EXIT_DIFFERENT, EXIT_ERROR, EXIT_SAME
from megatron_fsdp.errors import ConfigurationError, first_line
from megatron_fsdp.optional_packages import require

if TYPE_CHECKING:
    from torch import Tensor, nn


_STRATEGIES = ("0", "1", "2", "3", "all")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Compare loss, every gradient, the gradient norm, updates and a checkpoint round trip of a sharded run with "
        "one process on the whole batch. Functions are given as package.module:name and are looked for in the current "
        "folder too. Exit status: 0 the same, 1 they differ, 2 it could not be run or judged (dropout, a loss that is "
        "no mean)."
    )
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="a function that builds the model")
    add(
        "--hf-config",
        metavar="PATH",
        type=Path,
        help="instead of MODEL: a transformers causal language model of this config.json (or its folder), with random "
        "weights and tokens, in eval mode (no dropout)",
    )
    add("--layers", type=int, metavar="N", help="with --hf-config: so many layers")
    add("--sequence-length", type=int, default=16, metavar="N", help="with --hf-config (default 16)")
    add("--samples", type=int, metavar="N", help="with --hf-config (default: 2 per rank and microbatch)")
    add("--batch", metavar="FN", help="a function of a seed, or of nothing, that makes a batch")
    add("--loss", metavar="FN", help="(model, samples) -> loss; without it the model's own .loss")
    add("--optimizer", default="adamw", metavar="FN", help="adamw (default), sgd, or (model) -> optimizer")
    add("--shard", metavar="FN", help="(model, optimizer) -> both sharded, instead of fully_shard")
    add("--ranks", type=int, default=3, metavar="N", help="ranks to start (default 3)")
    add("--strategy", nargs="+", default=["all"], choices=_STRATEGIES, help="of fully_shard (default all)")
    add("--steps", type=int, default=3, metavar="N", help="optimizer steps (default 3)")
    add("--microbatches", type=int, default=1, metavar="K", help="per step (default 1)")
    add("--max-norm", type=float, default=1.0, metavar="X", help="clip gradients (default 1; 0: do not)")
    add("--reduction", choices=("mean", "sum"), default="mean", help="how ranks' losses add up")
    add("--tolerance", type=float, metavar="X", help="allowed difference, relative (default: by dtype)")
    add("--seed", type=int, default=0, metavar="N", help="of weights and batches (default 0)")
    add("--device", metavar="NAME", help="cpu, cuda, ...; default: accelerators if there are enough")
    add("--no-checkpoint", dest="checkpoint", action="store_false", help="leave the checkpoint round trip out")
    add("--timeout", type=float, default=600.0, metavar="S", help="seconds for all of it (default 600)")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check parity, print the result, and return the exit status."""
    from megatron_fsdp.doctor import check_parity  # the engine; commands for checkpoints start without it

    model_fn, batch = _model_and_batch(args)
    strategies = (0, 1, 2, 3) if "all" in args.strategy else tuple(int(each) for each in args.strategy)
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does; ranks get the same path
    same = ("ranks", "steps", "microbatches", "reduction", "seed", "tolerance", "checkpoint", "device")
    report = check_parity(
        model_fn,
        batch,
        loss_fn=args.loss,
        optimizer_fn=args.optimizer,
        shard_fn=args.shard,
        strategies=strategies,
        max_norm=args.max_norm or None,
        timeout_s=args.timeout,
        **{name: getattr(args, name) for name in same},
    )
    if args.json:
        write_json(report.to_dict())
    else:
        write_line(report.summary())
    if not report.judged:
        return EXIT_ERROR
    return EXIT_SAME if report.passed else EXIT_DIFFERENT


def _model_and_batch(args: argparse.Namespace) -> tuple[Any, Any]:
    """Return the model function and its batch."""
    if (args.model is None) == (args.hf_config is None):
        raise ConfigurationError("give one of MODEL (package.module:name) and --hf-config")
    if args.model is not None:
        if args.batch is None:
            raise ConfigurationError("--batch is missing: give a function that makes a batch, as package.module:name")
        return args.model, args.batch
    path = str(args.hf_config.resolve())
    model_fn = partial(causal_model, path, args.layers)
    if args.batch is not None:
        return model_fn, args.batch
    size = getattr(_config(path, args.layers), "vocab_size", None)
    if not isinstance(size, int):
        raise ConfigurationError(f"--hf-config {path} has no vocab_size; give --batch, a function of a seed")
    samples = args.samples or 2 * args.ranks * args.microbatches
    return model_fn, partial(random_tokens, size, samples, args.sequence_length)


# ---- models of transformers: functions of this module, which can be sent to other processes --------------------------


def causal_model(path: str, layers: int | None) -> nn.Module:
    """Build a causal language model with random weights in eval mode; `layers` replaces the config's number."""
    config = _config(path, layers)
    transformers: Any = require("transformers", "--hf-config")
    try:
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:
        raise ConfigurationError(
            f"--hf-config {path}: transformers {transformers.__version__} builds no causal language model from "
            f"{type(config).__name__} ({first_line(error):.200}); give a function that builds the model as "
            "MODEL"
        ) from error
    return model.eval()


def random_tokens(vocabulary_size: int, samples: int, length: int, seed: int) -> dict[str, Tensor]:
    """Make a batch of random tokens: `input_ids` and `labels`, (samples, length) int64."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocabulary_size, (samples, length), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _config(path: str, layers: int | None) -> Any:
    if not Path(path).exists():
        raise ConfigurationError(f"--hf-config {path}: there is no such file or folder; give a local one")
    from megatron_fsdp.config.hf_config import read_config

    config = read_config(path)
    if layers is not None:
        config.num_hidden_layers = layers
    return config
