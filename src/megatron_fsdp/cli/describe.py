"""`mfsdp describe`: the sharding of a model on one rank of many, by the real engine without memory."""

from __future__ import annotations

import argparse
import inspect
from functools import partial
from pathlib import Path
from typing import Any

from megatron_fsdp.cli.output import add_json, write_json, write_line
from megatron_fsdp.config.command_parser import EXIT_SAME
from megatron_fsdp.config.import_path import literal
from megatron_fsdp.describe.text import width
from megatron_fsdp.errors import ConfigurationError

_DTYPES = ("main_params_dtype", "main_grads_dtype", "grad_comm_dtype")
_OPTIMIZERS = ("adamw", "sgd", "none")
_OUTER, _SHARD = "dp_outer", "dp_shard"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Wrap a model as one rank of a job would, in this process and without memory for it, and describe it: units, "
        "groups, padding, dtypes, placements, process groups, slots and buckets, and whether each option has an "
        "effect. Exit status: 0 described, 2 the model cannot be wrapped like that."
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", metavar="PATH", help="package.module:function, () -> the model; or a preset's name")
    model.add_argument("--hf-config", metavar="FILE", help="a config.json of transformers, or the folder it is in")
    parser.add_argument("--dtype", help="of the parameters of a config (what it says)")
    parser.add_argument("--ranks", metavar="N", type=int, required=True, help="data-parallel ranks in all")
    parser.add_argument("--outer", metavar="M", type=int, help="of these, ranks of the outer axis of hybrid sharding")
    parser.add_argument("--rank", metavar="R", type=int, default=0, help="which one to be (0)")
    parser.add_argument("--strategy", default="3", help="0 to 3, or a name such as optim_grads_params (3)")
    parser.add_argument("--outer-strategy", default="no_shard", help="no_shard or optim (no_shard)")
    parser.add_argument(
        "--units", metavar="CLASS", nargs="+", help="import paths of unit classes (found automatically)"
    )
    parser.add_argument(
        "--option",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="any other option of fully_shard, such as weight_allocator=resize or grad_comm_dtype=bf16; repeatable",
    )
    parser.add_argument("--optimizer", choices=_OPTIMIZERS, default="adamw", help="to connect (adamw)")
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl", help="of collectives (nccl)")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Describe the model, and return the exit status."""
    import torch

    from megatron_fsdp.config.precision import dtype_from_name
    from megatron_fsdp.plan.models import build_meta_model
    from megatron_fsdp.plan.simulate import simulated_model

    dtype = None if args.dtype is None else dtype_from_name(args.dtype, "--dtype")
    spec = args.model if args.hf_config is None else Path(args.hf_config)
    sizes = {_SHARD: args.ranks}
    if args.outer is not None:
        if args.outer < 1 or args.ranks % args.outer:
            raise ConfigurationError(f"--outer {args.outer} does not divide --ranks {args.ranks}; give a divisor")
        sizes = {_OUTER: args.outer, _SHARD: args.ranks // args.outer}
    kinds: dict[str, Any] = {"adamw": torch.optim.AdamW, "sgd": partial(torch.optim.SGD, lr=0.1)}
    kind = kinds.get(args.optimizer)
    with simulated_model(
        lambda: build_meta_model(spec, dtype),
        num_ranks=sizes,
        rank=args.rank,
        backend=args.backend,
        build_optimizer=kind and (lambda params: kind([param for param in params if param.requires_grad])),
        **_arguments(args),
    ) as simulated:
        described = simulated.model.describe()
    if args.json:
        write_json(described.to_dict())
    else:
        write_line(described.text(width()))
    return EXIT_SAME


def _arguments(args: argparse.Namespace) -> dict[str, Any]:
    from megatron_fsdp.config.precision import MixedPrecisionPolicy, dtype_from_name
    from megatron_fsdp.fully_shard import fully_shard_model

    known = set(inspect.signature(fully_shard_model).parameters) - {"module", "mixed_precision_policy"}
    found: dict[str, Any] = {
        "zero_dp_strategy": literal(args.strategy),
        "outer_dp_sharding_strategy": literal(args.outer_strategy),
        **({} if args.outer is None else {"dp_outer_dim": _OUTER}),
        **({} if args.units is None else {"fsdp_unit_modules": args.units}),
    }
    dtypes: dict[str, Any] = {}
    for given in args.option:
        name, equals, text = given.partition("=")
        if equals and name in known:
            found[name] = literal(text)
        elif equals and name in _DTYPES:
            dtypes[name] = None if text in ("None", "auto") else dtype_from_name(text, name)
        else:
            raise ConfigurationError(
                f"--option {given}: give NAME=VALUE with an option of fully_shard ({', '.join(sorted(known))}) or one "
                f"of {', '.join(_DTYPES)}"
            )
    return {**found, "mixed_precision_policy": MixedPrecisionPolicy(**dtypes)} if dtypes else found
