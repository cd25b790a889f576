"""How many parameters of a target take part in one token, from its shapes alone."""

from __future__ import annotations

from typing import Any

from .target_model import config_value


def active_parameters(model: Any, text_config: Any) -> int:
    """Parameters that multiply a token: without the embedding and the head, of routed experts only the share that is chosen.

    model: with its head, as shapes. text_config: its transformers config, for the number of experts.
    """
    outside = {id(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module is not None}
    experts = next((found for name in ("num_experts", "num_local_experts", "n_routed_experts") if (found := config_value(text_config, name))), 0)
    chosen = config_value(text_config, "num_experts_per_tok") or experts
    total = 0.0
    for name, parameter in model.named_parameters():
        if id(parameter) not in outside:
            total += parameter.numel() * (chosen / experts if experts and ".experts." in name else 1)
    return round(total)
