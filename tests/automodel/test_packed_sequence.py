"""transformers' look for packed sequences is left out as long as a model that asked for it lives, and no longer."""

import gc
from typing import Any

import torch
from torch import nn
from transformers import modeling_flash_attention_utils as flash

from megatron_fsdp.automodel import FSDP2Manager, create_device_mesh
from megatron_fsdp.automodel.forwards import assume_no_packed_sequences
from tests.automodel.process_groups import groups_destroyed
from tests.automodel.small_models import build
from tests.automodel.training import strategy
from tests.conftest import RunRanks

PACKED = torch.tensor([[0, 1, 2, 0, 1]])


def looks_packed() -> bool:
    return bool(flash._is_packed_sequence(PACKED, 1))


def test_look_is_left_out_while_the_model_lives_and_comes_back_afterwards() -> None:
    original, model = flash._is_packed_sequence, nn.Linear(1, 1)
    assert looks_packed()
    assume_no_packed_sequences(model)
    assert flash._is_packed_sequence(PACKED, 1) is False
    assert flash._is_packed_sequence(position_ids=PACKED, batch_size=1) is False
    del model
    gc.collect()
    assert flash._is_packed_sequence is original
    assert looks_packed()


def test_last_of_two_models_brings_the_look_back() -> None:
    original = flash._is_packed_sequence
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    for model in (first, second, first):
        assume_no_packed_sequences(model)
    del model, first
    gc.collect()
    assert not looks_packed()
    del second
    gc.collect()
    assert flash._is_packed_sequence is original


def test_patch_of_somebody_else_above_ours_is_left_alone() -> None:
    original, model = flash._is_packed_sequence, nn.Linear(1, 1)
    assume_no_packed_sequences(model)

    def theirs(*_: Any, **__: Any) -> bool:
        return True

    flash._is_packed_sequence = theirs
    try:
        del model
        gc.collect()
        assert flash._is_packed_sequence is theirs
    finally:
        flash._is_packed_sequence = original


def parallelize_with_and_without() -> None:
    original: Any = flash._is_packed_sequence
    with groups_destroyed():
        for flag in (False, True):
            config: Any = strategy("fsdp2", patch_is_packed_sequence=flag)
            mesh, _ = create_device_mesh(config)
            assert mesh is not None
            model = FSDP2Manager(config, mesh).parallelize(build("llama"))
            assert looks_packed() is (not flag)
            del model
            gc.collect()
            assert flash._is_packed_sequence is original


def test_flag_of_fsdp2_leaves_the_look_out(run_ranks: RunRanks) -> None:
    run_ranks(1, parallelize_with_and_without)
