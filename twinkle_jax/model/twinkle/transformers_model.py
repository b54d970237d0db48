"""Twinkle's `TransformersModel`: its verbs around a state and the functions that change it."""

from collections.abc import Iterator

import jax
import numpy as np
from jaxtyping import Array, Float

from twinkle_jax.data.batch import Batch, HostArray, micro_batches
from twinkle_jax.data.features import (
    LOSS_INPUTS,
    Feature,
    Inputs,
    PerSequence,
    Piece,
    align_loss_input,
    read_features,
    split_packed,
    write_pieces,
)
from twinkle_jax.model.decoder.sharding import batch_sharding
from twinkle_jax.model.train_step.grad_step import grad_step
from twinkle_jax.model.train_step.score_batch import score_batch
from twinkle_jax.model.train_step.step_summary import StepSummary, add_summaries
from twinkle_jax.model.twinkle.configured_policy import ConfiguredPolicy


class TransformersModel(ConfiguredPolicy):
    """A policy with Twinkle's verbs.

    It holds a [`TrainState`][twinkle_jax.model.TrainState] and calls the functions that are public
    beside it: `score_batch`, `grad_step`, `clip_gradients`, `apply_gradients`. Batches are padded
    to the sizes of [`bucket_size`][twinkle_jax.model.bucket_size]: the time axis from 16 on, the
    rows to `micro_batch_size`, or to a bucket without it. What was compiled for a bucket serves
    all batches that fit in it.

    Args:
        model_id: a directory with a Hugging Face checkpoint, a hub id, or a
            [`Decoder`][twinkle_jax.model.Decoder], whose parameters are copied.
        dtype: type to compute in, float32 by default. Trained parameters are float32 in any case;
            the frozen ones under adapters are in this type.
        mixed_precision: the same in Twinkle's words, `"no"` or `"bf16"`.
        mesh: devices to run on, from [`make_mesh`][twinkle_jax.model.make_mesh]; None for one.
        remat: as for [`hidden_states`][twinkle_jax.model.hidden_states].
        seed: of the noise of dropout.

    Raises:
        ValueError: for what `load_pretrained` refuses, and a mesh with other or explicit axes.
    """

    def forward_only(
        self,
        *,
        inputs: Inputs,
        return_logits: bool = False,
        return_entropy: bool = False,
        micro_batch_size: int | None = None,
        temperature: float = 1.0,
        disable_lora: bool = False,
        adapter_name: str | None = None,
    ) -> dict[str, np.ndarray]:
        """Score the labels of inputs, without gradients and without dropout.

        Args:
            inputs: input features, or trajectories once there is a template. Without `labels`,
                each token is scored that follows another one. A row may hold several sequences,
                whose `position_ids` start again at 0; each is computed as it is alone.
            return_logits: whether to return logits as well, which are large.
            return_entropy: whether to return entropies as well.
            micro_batch_size: sequences at a time; None for all.
            temperature: at which log-probabilities and entropies are taken.
            disable_lora: whether to leave adapters out, as for a reference policy.
            adapter_name: of the adapter, if there is one.

        Returns:
            `logps` [rows, time], in input order, padded with zeros on the right, and 0 where the
            label is −100; `entropies` likewise and `logits` [rows, time, vocabulary] when asked.
        """
        self._check_name(adapter_name)
        features = self._read_features(inputs, labels_needed=False)
        pieces = split_packed(features)
        adapter = {} if disable_lora and self._adapter else self.state.params
        shape = (len(features), max(len(feature["labels"]) for feature in features))
        outputs: dict[str, np.ndarray] = {}
        done = 0
        for batch, count in self._micro_batches(pieces, {}, micro_batch_size):
            scores = score_batch(
                adapter,
                batch,
                self.config,
                frozen=self._frozen,
                temperature=temperature,
                with_entropy=return_entropy,
                with_logits=return_logits,
                compute_dtype=self.dtype,
                mesh=self.mesh,
            )
            for name, values in scores._asdict().items():
                if values is not None:
                    out = outputs.setdefault(name, np.zeros(shape + values.shape[2:], np.float32))
                    write_pieces(out, np.asarray(values), pieces[done : done + count])
            done += count
        self._log.show(False, features, outputs)
        return outputs

    def forward_backward(
        self,
        *,
        inputs: Inputs,
        advantages: PerSequence | None = None,
        old_logps: PerSequence | None = None,
        ref_logps: PerSequence | None = None,
        micro_batch_size: int | None = None,
        temperature: float = 1.0,
        gradient_accumulation_steps: int | None = None,
        adapter_name: str | None = None,
    ) -> Float[Array, ""]:
        """Compute the loss and add its gradient to the accumulated gradients.

        Several calls before a step are one large batch: gradients and what they are divided by
        are summed, and divided once.

        Args:
            inputs: input features with `labels`, or trajectories once there is a template. A row
                may hold several sequences, as for `forward_only`.
            advantages: one a row or a sequence, or one a labelled token, or one a position. Without
                them policy losses are 0.
            old_logps: log-probabilities when the tokens were drawn, one a labelled token or one a
                position. None: on policy.
            ref_logps: the same under a reference policy.
            micro_batch_size: sequences at a time; None for all. It changes memory and time only.
            temperature: at which log-probabilities are taken, as the sampler did.
            gradient_accumulation_steps: how many such calls make an update, from now on.
            adapter_name: of the adapter, if there is one.

        Returns:
            The loss of these inputs.
        """
        self._check_name(adapter_name)
        self._set_accumulation(gradient_accumulation_steps)
        if self._loss is None:
            raise ValueError("a loss must be chosen first: call set_loss")
        features = self._read_features(inputs, labels_needed=True)
        pieces = split_packed(features)
        given = dict(zip(LOSS_INPUTS, (advantages, old_logps, ref_logps), strict=True))
        aligned = {name: align_loss_input(name, x, features, pieces) for name, x in given.items()}
        total: StepSummary | None = None
        for batch, _ in self._micro_batches(pieces, aligned, micro_batch_size):
            self.state, summary = grad_step(
                self.state,
                batch,
                self.config,
                self._loss,
                frozen=self._frozen,
                temperature=temperature,
                key=self.key if self._adapter and self._adapter[1].lora_dropout else None,
                compute_dtype=self.dtype,
                remat=self.remat,
                mesh=self.mesh,
            )
            total = summary if total is None else add_summaries(total, summary)
        assert total is not None
        self.cur_step += 1
        self._log.add_summary(total)
        facts = {"lr": self.learning_rate, "step": self.cur_step, "grad_norm": self._norm}
        self._log.show(True, features, {"loss": total.loss}, **facts)
        return total.loss

    def _read_features(self, inputs: Inputs, *, labels_needed: bool) -> list[Feature]:
        return read_features(
            inputs,
            self._template,
            vocab_size=self.config.vocab_size,
            labels_needed=labels_needed,
        )

    def _micro_batches(
        self, pieces: list[Piece], loss_inputs: dict[str, list[HostArray] | None], size: int | None
    ) -> Iterator[tuple[Batch, int]]:
        """Cut into micro-batches; on a mesh, spread the rows of each over it."""
        sequences = [piece.feature for piece in pieces]
        if self.mesh is None:
            yield from micro_batches(sequences, loss_inputs, size)
            return
        devices = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        for batch, count in micro_batches(
            sequences,
            loss_inputs,
            size,
            row_multiple=devices,
            time_multiple=self.mesh.shape["tensor"],
        ):
            yield jax.device_put(batch, batch_sharding(self.mesh)), count
