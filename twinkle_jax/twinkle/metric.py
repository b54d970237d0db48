"""Twinkle's metrics, with its keys and formats."""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from twinkle_jax.data import IGNORE, bucket_size, pad_rows
from twinkle_jax.loss import (
    PolicyMetrics,
    contrastive_metrics,
    policy_metrics,
    preference_metrics,
)
from twinkle_jax.twinkle.names import add_submodules, refuse

Numbers = np.ndarray[Any, Any]
Units = tuple[Numbers, Numbers | None, Numbers]


class _Means:
    """Weighted means by name, of numbers that are added up."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}

    def add(self, weight: float, **values: Any) -> None:
        for name, value in values.items():
            total, weights = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = total + weight * float(value), weights + weight

    def __call__(self) -> dict[str, float]:
        return {name: total / weights for name, (total, weights) in self._sums.items() if weights}


class Metric:
    """A metric: `accumulate` adds a pass, `calculate` reports on all since its last call.

    Metrics see the rows of all devices: `device_mesh` and `process_group` change nothing. A
    subclass of yours may take them, as Twinkle's must; they are None.
    """

    def __init__(self, device_mesh: Any = None, process_group: Any = None, **options: Any) -> None:
        self.device_mesh, self.process_group = device_mesh, process_group

    def reset(self) -> None:
        """Forget all passes."""

    def accumulate(self, inputs: Any, outputs: Any, **facts: Any) -> None:
        """Add a pass: its input features, its outputs, and the arguments of its loss."""

    def calculate(self) -> Mapping[str, Any]:
        """Report on all passes, then forget them."""
        return {}

    def gather_results(self, local_results: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return these results, which are of all devices already."""
        return local_results


class _PassMetric(Metric):
    """A metric of ours: refuses unknown options, and begins without passes."""

    def __init__(self, device_mesh: Any = None, process_group: Any = None, **options: Any) -> None:
        refuse(type(self).__name__, options)
        super().__init__(device_mesh, process_group)
        self.reset()

    def accumulate(self, inputs: Any = None, outputs: Any = None, **facts: Any) -> None:
        """Add a pass: its input features, its outputs, and the arguments of its loss."""
        self._add(inputs, outputs or {}, **facts)

    def calculate(self) -> Mapping[str, Any]:
        """Report on all passes, then forget them."""
        results = self._report()
        self.reset()
        return results

    def _add(self, inputs: Any, outputs: Any, **facts: Any) -> None:
        raise NotImplementedError

    def _report(self) -> dict[str, Any]:
        raise NotImplementedError


class Accuracy(_PassMetric):
    """`accuracy`, the share of labels that are the most likely token, and its two counts.

    `accumulate` takes one feature or one batch, and ignores passes without `logits`.
    """

    def reset(self) -> None:
        """Forget all passes."""
        self.total_correct = self.total_count = 0

    def _add(self, inputs: Any, outputs: Any, **facts: Any) -> None:
        assert not isinstance(inputs, list), "Accuracy does not support list InputFeature"
        if outputs.get("logits") is None:
            return
        tokens = np.asarray(outputs["logits"]).argmax(-1)
        labels = np.asarray(inputs["labels"])[..., -tokens.shape[-1] :]
        mask = labels != IGNORE
        if inputs.get("completion_mask") is not None:
            mask = np.asarray(inputs["completion_mask"], bool)[..., -labels.shape[-1] :]
        self.total_correct += int(((tokens == labels) & mask).sum())
        self.total_count += int(mask.sum())

    def _report(self) -> dict[str, Any]:
        correct, total = self.total_correct, self.total_count
        if not total:
            return {}
        share = f"{correct / total:.2f}"
        return {"accuracy": share, "correct_tokens": correct, "total_tokens": total}


class LossMetric(_PassMetric):
    """Mean `loss`, per token with `loss_reduction='sum'`, and the last `grad_norm`."""

    def reset(self) -> None:
        """Forget all passes."""
        self.total_loss, self.total_count, self.num_tokens, self.grad_norm = 0.0, 0, 0.0, 0.0

    def _add(self, inputs: Any, outputs: Any, **facts: Any) -> None:
        if "loss" not in outputs:
            return
        if facts.get("loss_reduction") == "sum":
            tokens = outputs.get("num_tokens")
            if tokens is None:
                tokens = sum(int((np.asarray(x["labels"]) >= 0).sum()) for x in _list(inputs))
            self.num_tokens += float(tokens)
        if facts.get("grad_norm") is not None:
            self.grad_norm = float(facts["grad_norm"])
        self.total_loss += float(outputs["loss"])
        self.total_count += 1

    def _report(self) -> dict[str, Any]:
        divisor = self.num_tokens or self.total_count or 1
        return {"loss": f"{self.total_loss / divisor:.4f}"} | _norm(self.grad_norm)


class TrainMetric(_PassMetric):
    """`learning rate`, `iters`, `total time elapse` and `speed` of training."""

    def __init__(self, device_mesh: Any = None, process_group: Any = None, **options: Any) -> None:
        self.lr: Any = None
        self.step, self.gradient_accumulation_steps = 0, 1
        self.start_time = time.time()
        super().__init__(device_mesh, process_group, **options)

    def reset(self) -> None:
        """Forget all passes."""
        self.time, self.last_step = time.time(), self.step

    def _add(self, inputs: Any, outputs: Any, **facts: Any) -> None:
        rates = facts.get("lr")
        self.lr = rates if isinstance(rates, list) else [rates]
        self.step = facts.get("step", self.step)
        steps = facts.get("gradient_accumulation_steps")
        self.gradient_accumulation_steps = steps or self.gradient_accumulation_steps

    def _report(self) -> dict[str, Any]:
        rates = [f"{rate:.6e}" for rate in self.lr or () if rate is not None]
        names = ["learning rate"]
        if len(rates) > 1:
            names = [f"learning rate(param group {i})" for i in range(1, len(rates) + 1)]
        interval, elapsed = time.time() - self.time, time.time() - self.start_time
        updates = (self.step - self.last_step) / self.gradient_accumulation_steps
        return {
            **dict(zip(names, rates, strict=False)),
            "iters": self.step // self.gradient_accumulation_steps,
            "total time elapse": (
                f"{elapsed / 60:.1f} minutes" if interval >= 60 else f"{elapsed:.0f} seconds"
            ),
            "speed": f"{updates / max(interval, 1e-9):.2f} iters/s",
        }


class CompletionRewardMetric(_PassMetric):
    """Mean and standard deviation of each reward, and means of completion lengths and of times.

    `accumulate` takes `rewards` by name, `completion_lengths`, and the seconds `generate_time` and
    `weight_sync_time`. `calculate` keeps what was accumulated, until `reset`.

    Example:
        >>> metric = CompletionRewardMetric()
        >>> metric.accumulate(rewards={"format": [1.0, 0.0]}, completion_lengths=[3, 5])
        >>> metric.calculate()["train/format_reward"], metric.calculate()["train/completion_length"]
        (0.5, 4.0)
    """

    def reset(self) -> None:
        """Forget all passes."""
        self.means = _Means()
        self.rewards: dict[str, list[float]] = {}

    def _add(
        self,
        inputs: Any,
        outputs: Any,
        *,
        rewards: Mapping[str, Sequence[float | None]] | None = None,
        completion_lengths: Sequence[int] | None = None,
        generate_time: float | None = None,
        weight_sync_time: float | None = None,
        **facts: Any,
    ) -> None:
        for name, numbers in (rewards or {}).items():
            present = [x for x in numbers if x is not None]  # None: it does not apply
            self.rewards.setdefault(name, []).extend(present)
        measured: dict[str, Sequence[float | None]] = {
            "profiling/Time taken: move_model_to_sampler": [weight_sync_time],
            "profiling/Time taken: generate": [generate_time],
            "train/completion_length": () if completion_lengths is None else completion_lengths,
        }
        for name, values in measured.items():
            for x in values:
                if x is not None:
                    self.means.add(1, **{name: x})

    def calculate(self) -> Mapping[str, Any]:
        """Report on all completions since `reset`."""
        results = self.means()
        for name, values in self.rewards.items():
            results[f"train/{name}_reward"] = statistics.fmean(values) if values else -1.0
            deviation = statistics.stdev(values) if len(values) > 1 else 0.0
            results[f"train/{name}_reward_std"] = deviation
        return results


class DPOMetric(_PassMetric):
    r"""Log-probabilities and implicit rewards of pairs; chosen and rejected rows alternate.

    Means of `logps/chosen`, `logps/rejected`, and with `ref_outputs` or `ref_logps` of
    `logps/ref_chosen`, `logps/ref_rejected`, `rewards/chosen`, `rewards/rejected` (the sum over
    tokens of $\beta(\log \pi - \log \pi^{ref})$), `rewards/margins` and `rewards/accuracies`.
    """

    def __init__(
        self,
        device_mesh: Any = None,
        process_group: Any = None,
        ignore_index: int = IGNORE,
        beta: float = 0.1,
    ) -> None:
        self.ignore_index, self.beta = ignore_index, beta
        super().__init__(device_mesh, process_group)

    def reset(self) -> None:
        """Forget all passes."""
        self.total_count, self.logps, self.rewards = 0, _Means(), _Means()

    def _add(self, inputs: Any, outputs: Any, **facts: Any) -> None:
        if outputs.get("logps") is None or not len(outputs["logps"]):
            return
        mask = _labels(inputs, self.ignore_index) != self.ignore_index
        assert len(mask) % 2 == 0, f"DPO metric needs an even batch, got {len(mask)} rows"
        chosen, rejected = _pairs(outputs["logps"], mask)
        count = len(chosen)
        self.total_count += count
        self.logps.add(count, chosen=chosen.mean(), rejected=rejected.mean())
        reference = (facts.get("ref_outputs") or {}).get("logps", facts.get("ref_logps"))
        if reference is None:
            return
        ref_chosen, ref_rejected = _pairs(_spread(_split(reference), mask), mask)
        self.logps.add(count, ref_chosen=ref_chosen.mean(), ref_rejected=ref_rejected.mean())
        ratios = chosen - ref_chosen, rejected - ref_rejected
        means = _preference_metrics(*ratios, beta=self.beta)
        self.rewards.add(count, chosen=means.chosen_reward, rejected=means.rejected_reward)
        self.rewards.add(count, margins=means.margin, accuracies=100 * means.accuracy)

    def _report(self) -> dict[str, Any]:
        results = {f"logps/{name}": f"{mean:.2f}" for name, mean in self.logps().items()}
        for name, mean in self.rewards().items():
            results[f"rewards/{name}"] = f"{mean:.1f}%" if name == "accuracies" else f"{mean:.4f}"
        return results


class GRPOMetric(_PassMetric):
    r"""Distance of the policy from the one that sampled, and how often the ratio is clipped.

    With $\Delta = \log \pi - \log \pi^{old}$ at labelled tokens: `train/mean_new_logp`,
    `train/policy_confidence`, its exponential, and with `old_logps` `train/mean_old_logp`,
    `train/logp_diff_mean`, `train/approx_kl`, the mean of $e^\Delta - \Delta - 1$,
    `train/token_kl_max` and `train/token_ratio_max`; `train/entropy` with entropies; with
    advantages too `train/clip_ratio_low`, `train/clip_ratio_high` and their sum, where ratios are
    clipped to $[1 - $`epsilon`$, 1 + $`epsilon_high`$]$. Log-probabilities are multiplied by
    `temperature`, unless it is 0.

    With `top_k_kl`, `_high_kl_records` describes that many tokens of each pass whose divergence is
    largest: number of the sequence since the last report (`gsi`), position, `token_id`, `kl`,
    `ratio`, `logp_new` and `logp_old`.
    """

    def __init__(
        self,
        device_mesh: Any = None,
        process_group: Any = None,
        ignore_index: int = IGNORE,
        temperature: float = 1.0,
        epsilon: float = 0.2,
        epsilon_high: float | None = None,
        top_k_kl: int = 0,
        **options: Any,
    ) -> None:
        self.ignore_index, self.top_k_kl = ignore_index, top_k_kl
        self.temperature = temperature or 1.0  # at 0 log-probabilities are those at 1
        high = epsilon if epsilon_high is None else epsilon_high
        self.bounds = {"epsilon": epsilon, "epsilon_high": high}
        super().__init__(device_mesh, process_group, **options)

    def reset(self) -> None:
        """Forget all passes."""
        self.max_token_kl = self.max_token_ratio = self.sum_new = 0.0
        self.n_tokens, self.means = 0, _Means()
        self.sequences, self.high_kl_records = 0, list[dict[str, Any]]()

    def _add(
        self,
        inputs: Any,
        outputs: Any,
        *,
        old_logps: Any = None,
        advantages: Any = None,
        **facts: Any,
    ) -> None:
        if outputs.get("logps") is None or not len(outputs["logps"]):
            return
        labels = _labels(inputs, self.ignore_index)
        mask = labels != self.ignore_index
        first, self.sequences = self.sequences, self.sequences + len(mask)
        if not mask.any():
            return
        logps = self.temperature * _rows(outputs["logps"])[:, : mask.shape[1]]
        count = int(mask.sum())
        self.n_tokens += count
        self.sum_new += float(logps[mask].sum())
        if outputs.get("entropies") is not None:
            entropies = _rows(outputs["entropies"])[:, : mask.shape[1]]
            self.means.add(count, entropy=entropies[mask].mean())
        if old_logps is None:
            return
        old = self.temperature * _spread(old_logps, mask)
        difference = np.where(mask, logps - old, 0)
        kl = np.expm1(difference) - difference
        values = {"kl": kl, "ratio": np.exp(difference), "logp_new": logps, "logp_old": old}
        largest = np.argsort(-kl, axis=None, kind="stable")[: self.top_k_kl]
        for row, pos in zip(*np.unravel_index(largest, kl.shape), strict=True):
            if kl[row, pos] > 0:
                numbers = {name: float(x[row, pos]) for name, x in values.items()}
                facts = {
                    "gsi": first + int(row),
                    "pos": int(pos),
                    "token_id": int(labels[row, pos]),
                }
                self.high_kl_records.append(facts | numbers)
        policy = _policy_metrics(difference, None, mask)
        self.means.add(count, mean_old_logp=old[mask].mean(), approx_kl=policy.approximate_kl)
        self.max_token_kl = max(self.max_token_kl, float(kl.max()))
        self.max_token_ratio = max(self.max_token_ratio, float(policy.ratio_max))
        if advantages is not None:
            log_ratio, signs, counted = self._units(difference, _spread(advantages, mask), mask)
            clips = _policy_metrics(log_ratio, signs, counted, **self.bounds)
            low, high = float(clips.clip_fraction_low), float(clips.clip_fraction_high)
            rates = {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio": low + high}
            self.means.add(int(counted.sum()), **rates)

    def _units(self, log_ratio: Numbers, advantages: Numbers, mask: Numbers) -> Units:
        """Return log-ratio, advantage and mask of what is clipped: here of tokens."""
        return log_ratio, advantages, mask

    def _report(self) -> dict[str, Any]:
        if not self.n_tokens:
            return {}
        mean = self.sum_new / self.n_tokens
        results = {"policy_confidence": math.exp(mean), "mean_new_logp": mean, **self.means()}
        if "mean_old_logp" in results:
            results["logp_diff_mean"] = mean - results["mean_old_logp"]
            results["token_kl_max"] = self.max_token_kl
            results["token_ratio_max"] = self.max_token_ratio
        report: dict[str, Any] = {f"train/{name}": number for name, number in results.items()}
        if self.high_kl_records:
            report["_high_kl_records"] = self.high_kl_records
        return report


class GSPOMetric(GRPOMetric):
    """`GRPOMetric` with clip rates of sequences, by the mean log-ratio of their tokens."""

    def _units(self, log_ratio: Numbers, advantages: Numbers, mask: Numbers) -> Units:
        counts = mask.sum(1, keepdims=True)
        means = (
            np.where(mask, x, 0).sum(1, keepdims=True) / np.maximum(counts, 1)
            for x in (log_ratio, advantages)
        )
        return *means, counts > 0


class CISPOMetric(GRPOMetric):
    """`GRPOMetric` with clip rates that do not depend on the sign of the advantage."""

    def _units(self, log_ratio: Numbers, advantages: Numbers, mask: Numbers) -> Units:
        return log_ratio, None, mask


class EmbeddingMetric(_PassMetric):
    """Similarity of anchors, whose label is 1, and positives, the embeddings after them.

    `pos_sim` is their cosine, with `pos_sim_min` and `pos_sim_max`; `neg_sim` the mean product of
    anchors and other positives. With a loss, `loss` and `grad_norm` too. Embeddings are the
    `embeddings` of outputs, or their `logits`.
    """

    def reset(self) -> None:
        """Forget all passes."""
        self.grad_norm, self.pos_count, self.means = 0.0, 0, _Means()
        self.extremes: list[float] = []

    def _add(self, inputs: Any, outputs: Any, **facts: Any) -> None:
        rows = outputs.get("embeddings", outputs.get("logits"))
        if rows is None:
            return
        rows = np.asarray(rows, np.float64)
        rows = rows[:, 0] if rows.ndim == 3 else rows
        labels = np.concatenate([np.asarray(x["labels"]).reshape(-1) for x in _list(inputs)])
        (numbers,) = np.nonzero(labels)
        if not numbers.size:
            return
        count = len(numbers)
        products = rows[numbers] @ rows[numbers + 1].T
        lengths = np.linalg.norm(rows, axis=1)
        cosines = products / np.maximum(np.outer(lengths[numbers], lengths[numbers + 1]), 1e-8)
        positives, mask = np.arange(count), np.ones((count, count), bool)
        near, far = (_contrastive_metrics(x, positives, mask) for x in (cosines, products))
        self.pos_count += count
        self.means.add(count, pos_sim=near.positive_mean)
        self.means.add(count * (count - 1), neg_sim=far.negative_mean)
        self.extremes += [float(near.positive_min), float(near.positive_max)]
        if outputs.get("loss") is not None:
            self.means.add(1, loss=outputs["loss"])
        if facts.get("grad_norm") is not None:
            self.grad_norm = float(facts["grad_norm"])

    def _report(self) -> dict[str, Any]:
        results = self.means()
        if self.extremes:
            results |= {"pos_sim_min": min(self.extremes), "pos_sim_max": max(self.extremes)}
        return {name: f"{x:.4f}" for name, x in results.items()} | _norm(self.grad_norm)


def _list(inputs: Any) -> list[Any]:
    return inputs if isinstance(inputs, list) else [inputs]


def _norm(grad_norm: float) -> dict[str, str]:
    return {"grad_norm": f"{grad_norm:.6f}"} if grad_norm != 0 else {}  # NaN is shown


def _labels(inputs: Any, padding: int) -> Numbers:
    """Stack the labels of features, or of batches of them."""
    rows = [row for x in _list(inputs) for row in np.atleast_2d(np.asarray(x["labels"]))]
    return pad_rows(rows, padding)


def _split(values: Any) -> list[Numbers]:
    """List the rows of arrays, of rows or of one row."""
    return [row for x in _list(values) for row in np.atleast_2d(np.asarray(x, np.float64))]


def _rows(values: Any) -> Numbers:
    return pad_rows(_split(values))


def _spread(values: Any, mask: Numbers) -> Numbers:
    """Spread rows of one number, one for each labelled token, or one for each position."""
    spread = np.zeros(mask.shape)
    for i, (row, kept) in enumerate(zip(values, mask, strict=True)):
        numbers = np.asarray(row, np.float64).reshape(-1)
        if numbers.size in (1, kept.sum()):
            spread[i, kept] = numbers
        elif kept[numbers.size :].any():
            raise ValueError(
                f"log-probabilities and advantages of row {i} must be one number, one for each of "
                f"{kept.sum()} labels or one for each position, got {numbers.size}"
            )
        else:  # one for each position; rows may be padded, or end with their labels
            numbers = numbers[: kept.size]
            spread[i, : numbers.size] = numbers
    return spread


_preference_metrics = jax.jit(preference_metrics)
_contrastive_metrics = jax.jit(contrastive_metrics)
_compiled = jax.jit(policy_metrics)


def _policy_metrics(
    log_ratio: Numbers, advantages: Numbers | None, mask: Numbers, **bounds: float
) -> PolicyMetrics:
    """Call `policy_metrics`; rows are padded so that few widths are compiled."""
    width = bucket_size(mask.shape[1], smallest=16)
    arrays = (log_ratio, advantages, mask)
    return _compiled(*(None if x is None else pad_rows(x, length=width) for x in arrays), **bounds)


def _pairs(logps: Any, mask: Numbers) -> tuple[Numbers, Numbers]:
    """Sum log-probabilities over labelled tokens: of chosen rows, and of rejected ones."""
    logps = _rows(logps)
    width = min(mask.shape[1], logps.shape[1])  # rows may be padded, or end with their labels
    sums = np.where(mask[:, :width], logps[:, :width], 0).sum(1)
    return sums[0::2], sums[1::2]


add_submodules(__name__, "base")
