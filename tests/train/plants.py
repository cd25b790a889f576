"""Faults planted into an exported drafter: each edits config.json or the tensors of a folder, as somebody's bug once did."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dflash_cache.train.doctor import Answer, Request
from dflash_cache.train.patient import Patient
from dflash_cache.train.plain_forward import PlainDrafter
from dflash_cache.train.replay import NO_LAYER, leading, plain_drafts

Plant = Callable[[Path], None]


def config(**changes: Any) -> Plant:
    """Fields of config.json; those that stand in dflash_config too are changed there as well."""

    def plant(folder: Path) -> None:
        path = folder / "config.json"
        document = json.loads(path.read_text())
        document |= changes
        document["dflash_config"] |= {name: value for name, value in changes.items() if name in document["dflash_config"]}
        if "rope_theta" in changes:
            document["rope_parameters"]["rope_theta"] = changes["rope_theta"]
        path.write_text(json.dumps(document))

    return plant


def tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Plant:
    """Tensors of model.safetensors."""

    def plant(folder: Path) -> None:
        path = folder / "model.safetensors"
        found = load_file(path)
        save_file({name: tensor.clone().contiguous() for name, tensor in {**found, **change(found)}.items()}, path)

    return plant


def _columns(order: tuple[int | None, ...]) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    def change(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        blocks = found["fc.weight"].chunk(len(order), dim=1)
        return {"fc.weight": torch.cat([torch.zeros_like(blocks[0]) if place is None else blocks[place] for place in order], dim=1)}

    return change


def _swapped(one: str, other: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda found: {name: found[name.replace(old, new)] for old, new in ((one, other), (other, one)) for name in found if old in name}


def _noisy(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: (tensor + torch.randn(tensor.shape, generator=generator) * tensor.std()).to(tensor.dtype)
        for name, tensor in found.items()
        if tensor.dim() > 1
    }


PLANTS: dict[str, tuple[Plant, str]] = {
    "rope_theta 100": (config(rope_theta=100.0), "rope_theta 10000 as trained, where the folder says 100"),
    "rope_theta 1e6": (config(rope_theta=1e6), "rope_theta 10000 as trained, where the folder says 1e+06"),
    "mask token is eos": (config(mask_token_id=2), "mask_token_id 3 as trained, where the folder says 2"),
    "layer ids one too low": (config(target_layer_ids=[0, 1, 2]), "layer_ids 1,2,3 as trained, where the folder says 0,1,2"),
    "layer ids one too high": (config(target_layer_ids=[2, 3, 4]), "layer_ids 1,2,3 as trained, where the folder says 2,3,4"),
    "block size 3": (config(block_size=3), "block_size 4 as trained, where the folder says 3"),
    "block size 8": (config(block_size=8), "block_size 4 as trained, where the folder says 8"),
    "fc columns reversed": (tensors(_columns((2, 1, 0))), "fc.weight has the columns of its layers in the order 2, 1, 0"),
    "fc columns of a layer are zeros": (tensors(_columns((0, 1, None))), "fc.weight has zeros in the columns of layer number 2 (of 3, from 0)"),
    "other weights": (tensors(_noisy), "differ, so the folder holds other weights"),
}
SILENT: dict[str, tuple[Plant, str]] = {
    "causal": (config(is_causal=True), "causal False as trained, where the folder says True"),
    "epsilon": (config(rms_norm_eps=1e-5), "norm_eps 1e-06 as trained, where the folder says 1e-05"),
    "norm in place of hidden_norm": (
        tensors(lambda found: {"hidden_norm.weight": found["norm.weight"]}),
        "hidden_norm.weight is the run's norm.weight",
    ),
    "q_norm and k_norm exchanged": (
        tensors(_swapped("q_norm", "k_norm")),
        "layers.0.self_attn.k_norm.weight is the run's layers.0.self_attn.q_norm.weight",
    ),
}
"""Faults that change nothing on documents as simple as these."""
WINDOWED: dict[str, tuple[Plant, str]] = {
    "a window one too small": (config(sliding_window=6), "windows 7 as trained, where the folder says 6"),
    "the window is lost": (
        config(layer_types=["full_attention"], sliding_window=None, use_sliding_window=False),
        "windows 7 as trained, where the folder says None",
    ),
    "sliding layers are not causal": (config(is_causal=False), "causal True as trained, where the folder says False"),
}
FAULTY: dict[str, tuple[dict[str, object], str]] = {
    "layers one too high": ({"layer_ids": (2, 3, 4)}, "layers 2,3,4, not 1,2,3"),
    "layers reversed": ({"layer_ids": (3, 2, 1)}, "layers in the order 3,2,1"),
    "a layer missing": ({"layer_ids": (1, NO_LAYER, 3)}, "layer 2 missing (zeros)"),
    "the last layer normed": ({"normed_last": True}, "the last selected layer after the target's final norm"),
    "the anchor's slot drafts": ({"first_slot": 0}, "the first token is drafted by slot 0, not by slot 1"),
    "positions late by one": ({"position_offset": 1}, "positions of the block shifted by +1"),
    "rotary base": ({"rope_theta": 1e6}, "rope_theta 1e+06, not 10000"),
    "mask token": ({"mask_token_id": 2}, "mask token 2 (eos), not 3"),
}
"""What an engine may do otherwise than the folder says, and the doctor's word for it."""


def engine(made: Path, folder: Path, wrong_after: int | None = None, **changed: object) -> Callable[[Sequence[Request]], list[Answer]]:
    """An engine that reads the folder with these conventions changed, and leaves the cached text after `wrong_after` tokens of each answer."""
    patient = Patient(made / "held-out", folder, None, 99, "cpu")
    how = replace(patient.plain.conventions, **changed)

    def serve(requests: Sequence[Request]) -> list[Answer]:
        answers = []
        for document, request in zip(patient.documents, requests, strict=True):
            assert request.prompt == document.batch.input_ids_T[:12].tolist()
            text = document.answer[: request.answer_tokens]
            if wrong_after is not None:
                text = [*text[:wrong_after], *[0] * (len(text) - wrong_after)]
            draft_at = plain_drafts(PlainDrafter(patient.plain.tensors, how), patient.head, patient.stored, document)
            drafts, won, accepted = [], 1, 0
            while won < len(text):
                drafts.append(draft_at(len(request.prompt) + won - 1))
                streak = leading(drafts[-1], text[won:])
                accepted, won = accepted + streak, won + streak + 1
            answers.append(Answer(text, [*drafts, [0, 0, 0]], len(drafts), accepted))
        return answers

    return serve
