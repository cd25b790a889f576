"""The transformers engine: plain forward passes with hooks on the blocks. Slow and obvious; the vLLM engine is tested against it.

Hooks the blocks themselves, because what transformers calls the last hidden state has been through the final norm. Runs on a GPU when
there is one. Documents of about the same length go together, padded on the right.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..common.errors import InputError, RunFailed
from ..common.sample import NO_TOKEN, Sample
from .engine import Document, EngineJob, Outcome, WriterCounts
from .intake import Intake
from .length_batches import length_batches
from .target_model import config_value, find_blocks, load_config, model_class
from .turns import Turn, Turns


def transformers_version() -> str:
    """The installed version."""
    import transformers

    return str(transformers.__version__)


class TransformersEngine:
    """See `engine.Engine`."""

    def __init__(self, job: EngineJob) -> None:
        """Load the target in bfloat16. Raises InputError when it cannot be loaded, or not whole."""
        import torch

        self.job = job
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        place = f"--model {job.target.name}"
        config = load_config(job.target.folder, job.config.trust_remote_code, place)
        self._model = _load(job, config, place).to(self._device).eval()
        _, _, self._blocks = find_blocks(self._model, job.target.spec.num_layers, place)
        self._max_len = config_value(config.get_text_config(decoder=True), "max_position_embeddings") or job.config.max_length
        self._keeps_logits = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        self._turns = Turns(job)
        self._intake = Intake(job.cache, job.writer_id)

    def run(self, documents: Iterable[Document]) -> Iterator[list[Outcome]]:
        """See `engine.Engine`."""
        for batch in length_batches(documents, self.job.config.batch_size, self.job.config.seed):
            if self.job.config.generate:
                yield from map(self._conversation, batch)
                continue
            turns = [Turns.first(document) for document in batch]
            fitting = [turn for turn in turns if len(turn.document) <= self._max_len]
            outcomes = [outcome for turn in turns if turn not in fitting for outcome in self._turns.refuse(turn, self._too_long(turn))]
            yield outcomes + self._store_all(fitting, [None] * len(fitting))

    def counts(self) -> WriterCounts:
        """See `engine.Engine`."""
        return WriterCounts(**self._intake.counts())

    def close(self, *, publish: bool) -> WriterCounts:
        """See `engine.Engine`."""
        self._intake.close(publish=publish)
        return self.counts()

    def _conversation(self, document: Document) -> list[Outcome]:
        """Ask all turns of one document, one after the other, and store what they end."""
        turn, outcomes = Turns.first(document), list[Outcome]()
        stored: list[Turn] = []
        answers: list[np.ndarray | None] = []
        while len(turn.document) <= self._max_len:
            answer = self._generate(turn.document)
            if turn.stored:
                stored.append(turn)
                answers.append(answer)
            following = self._turns.following(turn, answer)
            if not isinstance(following, Turn):
                outcomes = following
                break
            turn = following
        else:
            outcomes = self._turns.refuse(turn, self._too_long(turn))
        size = self.job.config.batch_size
        for place in range(0, len(stored), size):
            outcomes = outcomes + self._store_all(stored[place : place + size], answers[place : place + size])
        return outcomes

    def _too_long(self, turn: Turn) -> str:
        return f"it has {len(turn.document)} tokens; this model takes {self._max_len}"

    def _store_all(self, turns: list[Turn], answers: list[np.ndarray | None]) -> list[Outcome]:
        """Compute these together and store them. answers: int32 [N] each, None for a document of the data."""
        if not turns:
            return []
        documents = [turn.document for turn in turns]
        rows = [
            (document.input_ids, document.loss_mask, NO_TOKEN) if answer is None else turn.rows(answer)
            for turn, document, answer in zip(turns, documents, answers, strict=True)
        ]
        written = [0 if answer is None else len(answer) for answer in answers]
        computed = self._forward_fitting([input_ids for input_ids, _, _ in rows])
        return [self._store(*each) for each in zip(turns, written, rows, *computed, strict=True)]

    def _store(self, turn: Turn, written: int, rows: tuple[np.ndarray, np.ndarray, int], bits_TCH: np.ndarray, top1: int) -> Outcome:
        input_ids, mask, following = rows
        sample = Sample(
            key=turn.document.key,
            source=turn.document.source,
            source_row=turn.document.source_row,
            input_ids=input_ids,
            loss_mask=mask,
            hidden_states=bits_TCH[:, :-1],
            verifier_last_hidden_states=bits_TCH[:, -1],
            engine_top1=top1,
            next_token=following,
        )
        reason = self._intake.offer(sample)
        if reason is not None:
            return turn.rejected(reason, written)
        return turn.outcome(len(input_ids), int(mask.sum()), following, top1, bits_TCH[-1, -1].copy(), written)

    def _forward_fitting(self, fed: list[np.ndarray]) -> tuple[list[np.ndarray], list[int]]:
        """`_forward`, in halves when the GPU's memory does not hold the whole."""
        import torch

        try:
            return self._forward(fed)
        except torch.OutOfMemoryError:
            if len(fed) == 1:
                fix = "a smaller --max-length, a larger GPU, or --engine vllm"
                raise RunFailed(f"the GPU's memory does not hold a document of {len(fed[0])} tokens", place="transformers", fix=fix) from None
        torch.cuda.empty_cache()
        halves = [self._forward_fitting(half) for half in (fed[: len(fed) // 2], fed[len(fed) // 2 :])]
        return halves[0][0] + halves[1][0], halves[0][1] + halves[1][1]

    def _forward(self, fed: list[np.ndarray]) -> tuple[list[np.ndarray], list[int]]:
        """Per document its states, uint16 [T, L + 1, H] with the verifier's last, and the most likely next token."""
        import torch

        features = self.job.spec.settings.features
        lengths = [len(ids) for ids in fed]
        ids_ST = torch.zeros((len(fed), max(lengths)), dtype=torch.int64)
        attended_ST = torch.zeros_like(ids_ST)
        for row, ids in enumerate(fed):  # padded on the right: no token sees what comes after it, and positions count from 0
            ids_ST[row, : len(ids)] = torch.from_numpy(ids.astype(np.int64))
            attended_ST[row, : len(ids)] = 1
        layers = (*features.layer_ids, features.verifier_layer)
        ends = sorted({length - 1 for length in lengths})
        # Logits of the last rows only: those of every row would take more memory than the states.
        kept = {"logits_to_keep": torch.tensor(ends, device=self._device)} if self._keeps_logits else {}
        with torch.inference_mode(), hooked(self._blocks, layers) as outputs:
            logits_SUV = self._model(input_ids=ids_ST.to(self._device), attention_mask=attended_ST.to(self._device), use_cache=False, **kept).logits
            self._check_shapes(outputs, ids_ST.shape)
            states, top1 = [], []
            for row, length in enumerate(lengths):
                rows_TCH = torch.stack([outputs[layer][row, :length] for layer in layers], dim=1).to(torch.bfloat16).cpu()
                states.append(rows_TCH.view(torch.int16).numpy().view(np.uint16))
                top1.append(int(logits_SUV[row, ends.index(length - 1) if kept else length - 1].argmax()))
        return states, top1

    def _check_shapes(self, outputs: dict[int, Any], batch_shape: tuple[int, ...]) -> None:
        """Raise InputError unless each block gives one state a token."""
        expected = (*batch_shape, self.job.target.spec.hidden_size)
        for layer, output in outputs.items():
            if tuple(output.shape) != expected:
                problem, place = f"block {layer} gives no state of the hidden size for each token", f"--model {self.job.target.name}"
                raise InputError(problem, place=place, found=list(output.shape), expected=str(list(expected)), fix="use another model")

    def _generate(self, document: Document) -> np.ndarray:
        """The target's answer, int32 [N], its end-of-turn token included."""
        import torch
        from transformers import GenerationConfig

        config = self.job.config
        torch.manual_seed(int.from_bytes(document.key[:4], "little") ^ config.seed)
        sampling = (
            {"do_sample": True, "temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p}
            if config.temperature
            else {"do_sample": False}
        )
        stops = list(self.job.stop_token_ids)
        longest = min(config.max_new_tokens, config.max_length - len(document), max(self._max_len - len(document), 1))
        settings = GenerationConfig(max_new_tokens=longest, eos_token_id=stops, pad_token_id=(stops or [0])[0], **sampling)
        ids_1T = torch.from_numpy(document.input_ids.astype(np.int64))[None].to(self._device)
        with torch.inference_mode():
            out_1T = self._model.generate(ids_1T, attention_mask=torch.ones_like(ids_1T), generation_config=settings)
        answer = out_1T[0, len(document) :].cpu().numpy().astype(np.int32)
        if not len(answer):
            raise RunFailed("the target generated nothing", place="transformers")
        return np.asarray(answer)


def _load(job: EngineJob, config: Any, place: str) -> Any:
    """The model with all of its weights: what a checkpoint lacks transformers would make up, and nothing else would tell."""
    import torch

    try:
        model, info = model_class(config).from_pretrained(
            job.target.folder,
            dtype=torch.bfloat16,
            trust_remote_code=job.config.trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:
        raise InputError(f"transformers cannot load it: {error}", place=place) from error
    made_up = sorted({*info["missing_keys"], *(entry[0] if isinstance(entry, tuple) else entry for entry in info["mismatched_keys"])})
    if made_up:
        found = ", ".join(made_up[:3]) + (f" and {len(made_up) - 3} more" if len(made_up) > 3 else "")
        raise InputError("the weights lack tensors of the model", place=place, found=found, fix="fetch the model again, or use --engine vllm")
    return model


@contextmanager
def hooked(blocks: Any, layers: Iterable[int]) -> Iterator[dict[int, Any]]:
    """Collect the outputs of the given blocks, [S, T, H] each, while the model runs."""
    outputs: dict[int, Any] = {}

    def keep(layer: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            outputs[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [blocks[layer].register_forward_hook(keep(layer)) for layer in set(layers)]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
