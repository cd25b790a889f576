"""Checkpoints: complete or absent, checked by digest, the newest kept; and the optimizer's state under its own names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rows import tiny_drafter

from dflash_cache.common.errors import DflashError, InputError, RunFailed
from dflash_cache.train import checkpoint
from dflash_cache.train.checkpoint import CheckpointState
from dflash_cache.train.config import OptimConfig, TrainConfig
from dflash_cache.train.optim import build_optimizer, optimizer_tensors, restore_optimizer, set_lr


def state(step: int) -> CheckpointState:
    return CheckpointState(step=step, epoch=1, row=2, config=TrainConfig(), drafter=tiny_drafter().spec)


def save(run: Path, step: int, keep: int = 2) -> Path:
    return checkpoint.save(run, state(step), tiny_drafter(step).state_dict(), {"exp_avg.x": torch.full((3,), float(step))}, keep)


def test_what_is_saved_comes_back_and_gamma_is_in_it(tmp_path: Path):
    folder = save(tmp_path, 7)
    found = checkpoint.load_state(folder)
    assert found.model_dump(exclude={"files", "digest"}) == state(7).model_dump(exclude={"files", "digest"})
    assert found.config.loss.gamma == 4.0
    tensors = checkpoint.load_tensors(folder, found, checkpoint.MODEL)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in tiny_drafter(7).state_dict().items())
    assert checkpoint.load_tensors(folder, found, checkpoint.OPTIMIZER)["exp_avg.x"].tolist() == [7.0] * 3


def test_only_the_newest_are_kept(tmp_path: Path):
    for step in (5, 10, 15):
        save(tmp_path, step)
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["step-00000010", "step-00000015"]
    assert checkpoint.newest(tmp_path).name == "step-00000015"


def test_a_run_without_checkpoint_is_a_user_error(tmp_path: Path):
    with pytest.raises(InputError, match="has no checkpoint"):
        checkpoint.newest(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_any_changed_byte_is_found_and_the_fix_is_named(tmp_path: Path, name: str):
    folder = save(tmp_path, 7)
    data = bytearray((folder / name).read_bytes())
    data[-20] ^= 1
    (folder / name).write_bytes(data)

    def read() -> None:
        found = checkpoint.load_state(folder)
        for file in (checkpoint.MODEL, checkpoint.OPTIMIZER):
            checkpoint.load_tensors(folder, found, file)

    with pytest.raises(DflashError):
        read()


def test_an_interrupted_save_leaves_nothing_that_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save(tmp_path, 5)

    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.atomic, "publish_folder", crash)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 10)
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["step-00000005"]
    left = tmp_path / checkpoint.CHECKPOINTS / ".partial-step-00000010-1"
    left.mkdir()
    checkpoint.clear_partial(tmp_path)
    assert not left.exists()


def step_once(drafter, optimizer) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in drafter.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    set_lr(optimizer, 0.01)
    optimizer.step(torch.tensor(1.0), torch.tensor(True))


def test_moments_come_back_and_the_next_step_is_bit_identical():
    drafter = tiny_drafter()
    optimizer = build_optimizer(drafter, OptimConfig())
    step_once(drafter, optimizer)
    tensors = {name: tensor.clone() for name, tensor in optimizer_tensors(drafter, optimizer).items()}
    assert len(tensors) == 3 * 25
    assert float(tensors["exp_avg.fc.weight"].abs().max()) > 0
    twin = tiny_drafter()
    twin.load_state_dict(drafter.state_dict())
    other = build_optimizer(twin, OptimConfig())
    restore_optimizer(twin, other, tensors, "x")
    step_once(drafter, optimizer)
    step_once(twin, other)
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), twin.parameters()))


def test_a_state_that_does_not_fit_is_refused():
    drafter = tiny_drafter()
    optimizer = build_optimizer(drafter, OptimConfig())
    with pytest.raises(RunFailed, match="does not fit"):
        restore_optimizer(drafter, optimizer, {"exp_avg.fc.weight": torch.zeros(1)}, "x")


def test_norms_are_not_decayed():
    drafter = tiny_drafter()
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    optimizer = build_optimizer(drafter, OptimConfig(weight_decay=0.5))
    for parameter in drafter.parameters():
        parameter.grad = torch.zeros_like(parameter)
    set_lr(optimizer, 0.1)
    optimizer.step(torch.tensor(1.0), torch.tensor(True))
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name] * (0.95 if parameter.dim() > 1 else 1.0))


def test_tensors_of_equal_value_are_all_kept(tmp_path: Path):
    drafter = tiny_drafter()
    with torch.no_grad():
        drafter.layers[1].mlp.up_proj.weight.copy_(drafter.layers[0].mlp.up_proj.weight)
    folder = checkpoint.save(tmp_path, state(1), drafter.state_dict(), {}, 2)
    found = checkpoint.load_tensors(folder, checkpoint.load_state(folder), checkpoint.MODEL)
    assert found.keys() == drafter.state_dict().keys()


def test_the_best_is_kept_however_many_newer_ones_come(tmp_path: Path):
    for step in (5, 10, 15, 20):
        now = state(step).model_copy(update={"best_step": 5, "best_tau": 1.5})
        checkpoint.save(tmp_path, now, tiny_drafter(step).state_dict(), {}, 1)
        checkpoint.mark_best(tmp_path, now)
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["step-00000005", "step-00000020"]
    assert checkpoint.load_state(tmp_path / checkpoint.CHECKPOINTS / checkpoint.BEST).step == 5
    later = state(25).model_copy(update={"best_step": 25, "best_tau": 1.6})
    checkpoint.save(tmp_path, later, tiny_drafter(25).state_dict(), {}, 1)
    checkpoint.mark_best(tmp_path, later)
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["step-00000025"]
    assert (tmp_path / checkpoint.CHECKPOINTS / checkpoint.BEST).resolve().name == "step-00000025"


def test_a_checkpoint_of_a_version_with_fewer_settings_is_still_read(tmp_path: Path):
    """The digest is that of the document, not of what this version makes of it."""
    import json

    from dflash_cache.common.fingerprint import canonical, digest_bytes

    folder = save(tmp_path, 7)
    document = json.loads((folder / checkpoint.STATE).read_text())
    del document["config"]["optim"]["ema_decay"], document["processes"], document["digest"]
    (folder / checkpoint.STATE).write_text(json.dumps({**document, "digest": digest_bytes(canonical(document))}))
    assert checkpoint.load_state(folder).config.optim.ema_decay is None
