"""Twinkle's metrics, with its keys and formats: what `calculate_metric` and scripts report."""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from twinkle_jax.data import IGNORE, bucket_size
from twinkle_jax.loss import PolicyMetrics, policy_metrics
from twinkle_jax.twinkle.processor import pad_rows

Numbers = np.ndarray[Any, Any]


class Metric:
    """A metric: `accumulate` sees every pass, `calculate` gives numbers and begins anew.

    A subclass keeps its sums in attributes that `reset` sets.

    Args:
        device_mesh: unused: what a metric sees is already of all devices.
        process_group: unused, likewise.
        options: none others.
    """

    def __init__(self, device_mesh: Any = None, process_group: Any = None, **options: Any) -> None:
        if options:
            raise TypeError(f"{type(self).__name__} has no option {sorted(options)[0]!r}")
        self.reset()

    def accumulate(self, inputs: Any, outputs: Any, **facts: Any) -> None:
        """Look at a pass: its input features, its outputs, and the arguments of its loss."""
        raise NotImplementedError

    def calculate(self) -> Mapping[str, Any]:
        """Give the numbers since the last call."""
        raise NotImplementedError

    def reset(self) -> None:
        """Begin anew."""


class Accuracy(Metric):
    """How often the most likely token is the label: `accuracy`, two digits, and its counts."""

    def reset(self) -> None:
        """Begin anew."""
        self.total_correct = self.total_count = 0

    def accumulate(self, inputs: Any, outputs: Any, **facts: Any) -> None:
        """Count the positions of one feature or one batch; without `logits` nothing is counted."""
        assert not isinstance(inputs, list), "Accuracy does not support list InputFeature"
        logits = outputs.get("logits")
        if logits is None:
            return
        tokens = np.asarray(logits).argmax(-1)
        labels = np.asarray(inputs["labels"])[..., -tokens.shape[-1] :]
        mask = inputs.get("completion_mask")
        mask = (
            labels != IGNORE if mask is None else np.asarray(mask, bool)[..., -labels.shape[-1] :]
        )
        self.total_correct += int(((tokens == labels) & mask).sum())
        self.total_count += int(mask.sum())

    def calculate(self) -> Mapping[str, Any]:
        """Give the share of correct tokens; nothing where none were counted."""
        correct, total = self.total_correct, self.total_count
        self.reset()
        if not total:
            return {}
        share = f"{correct / total:.2f}"
        return {"accuracy": share, "correct_tokens": correct, "total_tokens": total}


class LossMetric(Metric):
    """The mean `loss` of passes, four digits, and the last `grad_norm`, six."""

    def reset(self) -> None:
        """Begin anew."""
        self.total_loss, self.total_count, self.num_tokens, self.grad_norm = 0.0, 0, 0.0, 0.0

    def accumulate(self, inputs: Any, outputs: Any, **facts: Any) -> None:
        """Add a loss; one with `loss_reduction='sum'` with the tokens that it is a sum over."""
        if "loss" not in outputs:
            return
        if facts.get("loss_reduction") == "sum":
            tokens = outputs.get("num_tokens")
            if tokens is None:
                features = inputs if isinstance(inputs, list) else [inputs]
                tokens = sum(int((np.asarray(x["labels"]) >= 0).sum()) for x in features)
            self.num_tokens += float(tokens)
        if facts.get("grad_norm") is not None:
            self.grad_norm = float(facts["grad_norm"])
        self.total_loss += float(outputs["loss"])
        self.total_count += 1

    def calculate(self) -> Mapping[str, Any]:
        """Give the mean."""
        divisor = self.num_tokens or self.total_count or 1
        results = {"loss": f"{self.total_loss / divisor:.4f}"}
        if self.grad_norm > 0:
            results["grad_norm"] = f"{self.grad_norm:.6f}"
        self.reset()
        return results


class TrainMetric(Metric):
    """`learning rate`, `iters`, `total time elapse` and `speed` of training."""

    def __init__(self, device_mesh: Any = None, process_group: Any = None, **options: Any) -> None:
        self.lr: Any = None
        self.step, self.gradient_accumulation_steps = 0, 1
        self.start_time = time.time()
        super().__init__(device_mesh, process_group, **options)

    def reset(self) -> None:
        """Begin an interval; what was reached stays."""
        self.time, self.last_step = time.time(), self.step

    def accumulate(self, inputs: Any, outputs: Any, **facts: Any) -> None:
        """Note where training is."""
        rates = facts.get("lr")
        self.lr = rates if isinstance(rates, list) else [rates]
        self.step = facts.get("step", self.step)
        steps = facts.get("gradient_accumulation_steps")
        self.gradient_accumulation_steps = steps or self.gradient_accumulation_steps

    def calculate(self) -> Mapping[str, Any]:
        """Say where training is, and how fast it goes."""
        results: dict[str, Any] = {}
        rates = [f"{rate:.6e}" for rate in self.lr or () if rate is not None]
        if len(rates) == 1:
            results["learning rate"] = rates[0]
        else:
            names = (f"learning rate(param group {i})" for i in range(1, len(rates) + 1))
            results |= dict(zip(names, rates, strict=True))
        results["iters"] = self.step // self.gradient_accumulation_steps
        interval, elapsed = time.time() - self.time, time.time() - self.start_time
        minutes = interval >= 60
        shown = f"{elapsed / 60:.1f} minutes" if minutes else f"{elapsed:.0f} seconds"
        results["total time elapse"] = shown
        updates = (self.step - self.last_step) / self.gradient_accumulation_steps
        results["speed"] = f"{updates / max(interval, 1e-9):.2f} iters/s"
        self.reset()
        return results


class CompletionRewardMetric(Metric):
    """Means and deviations of rewards by name, lengths, and times: `train/NAME_reward` and others.

    Example:
        >>> metric = CompletionRewardMetric()
        >>> metric.accumulate(rewards={"format": [1.0, 0.0]}, completion_lengths=[3, 5])
        >>> metric.calculate()["train/format_reward"], metric.calculate()["train/completion_length"]
        (0.5, 4.0)
    """

    def reset(self) -> None:
        """Begin anew; unlike the other metrics, `calculate` does not."""
        self.generate_time: list[float] = []
        self.weight_sync_time: list[float] = []
        self.rewards: dict[str, list[float]] = {}
        self.completion_lengths: list[int] = []

    def accumulate(
        self,
        inputs: Any = None,
        outputs: Any = None,
        *,
        rewards: Mapping[str, Sequence[float]] | None = None,
        completion_lengths: Sequence[int] | None = None,
        generate_time: float | None = None,
        weight_sync_time: float | None = None,
        **facts: Any,
    ) -> None:
        """Add completions: their rewards by name, their lengths, and how long a step took."""
        for name, values in (rewards or {}).items():
            self.rewards.setdefault(name, []).extend(values)
        self.completion_lengths.extend(completion_lengths or ())
        self.generate_time += [] if generate_time is None else [generate_time]
        self.weight_sync_time += [] if weight_sync_time is None else [weight_sync_time]

    @staticmethod
    def _mean(values: Sequence[float]) -> float:
        return sum(values) / len(values) if values else -1.0

    @staticmethod
    def _std(values: Sequence[float]) -> float:
        return statistics.stdev(values) if len(values) > 1 else 0.0

    def calculate(self) -> Mapping[str, Any]:
        """Give the numbers of what was added."""
        named = {
            "profiling/Time taken: move_model_to_sampler": self.weight_sync_time,
            "profiling/Time taken: generate": self.generate_time,
        }
        results = {name: self._mean(values) for name, values in named.items() if values}
        for name, values in self.rewards.items():
            results[f"train/{name}_reward"] = self._mean(values)
            results[f"train/{name}_reward_std"] = self._std(values)
        if self.completion_lengths:
            results["train/completion_length"] = self._mean(self.completion_lengths)
        return results


class DPOMetric(Metric):
    r"""Log-probabilities and implicit rewards of pairs, chosen and rejected rows taking turns.

    The reward of an answer is $\beta(\log \pi - \log \pi^{ref})$, summed over its tokens. Reported
    are means: `logps/chosen`, `logps/rejected`, and with `ref_outputs` or `ref_logps`
    `logps/ref_chosen`, `logps/ref_rejected`, `rewards/chosen`, `rewards/rejected`,
    `rewards/margins` and `rewards/accuracies`, in percent.

    Args:
        device_mesh: unused.
        process_group: unused.
        ignore_index: the label of positions that do not count.
        beta: $\beta$.
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
        """Begin anew."""
        self.total_count, self.total_correct = 0, 0
        self.has_rewards = False
        self.logps, self.ref_logps, self.rewards = np.zeros(2), np.zeros(2), np.zeros(2)

    def accumulate(self, inputs: Any, outputs: Any, **facts: Any) -> None:
        """Add pairs."""
        logps = outputs.get("logps")
        if logps is None or not len(logps):
            return
        labels, logps = _labels(inputs), _rows(logps)
        assert len(labels) % 2 == 0, f"DPO metric needs an even batch, got {len(labels)} rows"
        mask = labels != self.ignore_index
        chosen, rejected = _pairs(logps, mask)
        self.logps += [chosen.sum(), rejected.sum()]
        self.total_count += len(chosen)
        reference = (facts.get("ref_outputs") or {}).get("logps", facts.get("ref_logps"))
        if reference is None:
            return
        ref_chosen, ref_rejected = _pairs(_rows(reference), mask)
        rewards = self.beta * np.stack([chosen - ref_chosen, rejected - ref_rejected])
        self.ref_logps += [ref_chosen.sum(), ref_rejected.sum()]
        self.rewards += rewards.sum(1)
        self.total_correct += int((rewards[0] > rewards[1]).sum())
        self.has_rewards = True

    def calculate(self) -> Mapping[str, Any]:
        """Give the means."""
        if not self.total_count:
            return {}
        chosen, rejected = self.logps / self.total_count
        results = {"logps/chosen": f"{chosen:.2f}", "logps/rejected": f"{rejected:.2f}"}
        if self.has_rewards:
            chosen, rejected = self.ref_logps / self.total_count
            results["logps/ref_chosen"] = f"{chosen:.2f}"
            results["logps/ref_rejected"] = f"{rejected:.2f}"
            chosen, rejected = self.rewards / self.total_count
            results["rewards/chosen"] = f"{chosen:.4f}"
            results["rewards/rejected"] = f"{rejected:.4f}"
            results["rewards/margins"] = f"{chosen - rejected:.4f}"
            share = 100 * self.total_correct / self.total_count
            results["rewards/accuracies"] = f"{share:.1f}%"
        self.reset()
        return results


class GRPOMetric(Metric):
    r"""How far the policy is from the one that sampled, and how often its ratio is clipped.

    With $\Delta = \log \pi - \log \pi^{old}$ at labelled tokens: `train/mean_new_logp`,
    `train/policy_confidence`, its exponential, and with `old_logps` `train/mean_old_logp`,
    `train/logp_diff_mean`, `train/approx_kl`, the mean of $e^\Delta - \Delta - 1$,
    `train/token_kl_max` and `train/token_ratio_max`; `train/entropy` with entropies; with
    advantages too `train/clip_ratio_low`, `train/clip_ratio_high` and their sum.

    Args:
        device_mesh: unused.
        process_group: unused.
        ignore_index: the label of positions that do not count.
        temperature: log-probabilities are multiplied by it.
        epsilon: how far below 1 a ratio is not clipped.
        epsilon_high: how far above; None for the same.
    """

    def __init__(
        self,
        device_mesh: Any = None,
        process_group: Any = None,
        ignore_index: int = IGNORE,
        temperature: float = 1.0,
        epsilon: float = 0.2,
        epsilon_high: float | None = None,
        **options: Any,
    ) -> None:
        self.ignore_index, self.temperature, self.epsilon = ignore_index, temperature, epsilon
        self.epsilon_high = epsilon if epsilon_high is None else epsilon_high
        super().__init__(device_mesh, process_group, **options)

    def reset(self) -> None:
        """Begin anew."""
        self.n_tokens, self.n_entropy_tokens, self.n_clip = 0, 0, 0.0
        self.sum_new = self.sum_old = self.sum_kl = self.sum_entropy = 0.0
        self.clipped = np.zeros(2)
        self.max_token_kl = self.max_token_ratio = 0.0
        self.has_old = False

    def accumulate(
        self,
        inputs: Any,
        outputs: Any,
        *,
        old_logps: Any = None,
        advantages: Any = None,
        **facts: Any,
    ) -> None:
        """Add the labelled tokens of a pass."""
        logps = None if outputs is None else outputs.get("logps")
        if logps is None or not len(logps):
            return
        labels, logps = _labels(inputs), self.temperature * _rows(logps)
        mask = labels != self.ignore_index
        logps = logps[:, : mask.shape[1]]
        if not mask.any():
            return
        self.n_tokens += int(mask.sum())
        self.sum_new += float(logps[mask].sum())
        entropies = outputs.get("entropies")
        if entropies is not None:
            self.sum_entropy += float(_rows(entropies)[:, : mask.shape[1]][mask].sum())
            self.n_entropy_tokens += int(mask.sum())
        if old_logps is None:
            return
        old = self.temperature * _spread(old_logps, mask)
        difference = np.where(mask, logps - old, 0)
        sums = _policy_sums(difference, None, mask)
        least, most = float(sums.ratio_min), float(sums.ratio_max)
        self.sum_old += float(old[mask].sum())
        self.sum_kl += float(sums.approximate_kl)
        # The divergence of a token is convex in its ratio, so one of the ends has the largest.
        token_kl = max(ratio - 1 - math.log(ratio) for ratio in (least, most))
        self.max_token_kl = max(self.max_token_kl, token_kl)
        self.max_token_ratio = max(self.max_token_ratio, most)
        self.has_old = True
        if advantages is not None:
            log_ratio, signs, counted = self._units(difference, _spread(advantages, mask), mask)
            bounds = {"epsilon": self.epsilon, "epsilon_high": self.epsilon_high}
            sums = _policy_sums(log_ratio, signs, counted, **bounds)
            self.clipped += [float(sums.clip_fraction_low), float(sums.clip_fraction_high)]
            self.n_clip += int(counted.sum())

    def _units(
        self, log_ratio: Numbers, advantages: Numbers, mask: Numbers
    ) -> tuple[Numbers, Numbers | None, Numbers]:
        """Give what is clipped or not: here tokens, by the sign of their advantage."""
        return log_ratio, advantages, mask

    def calculate(self) -> Mapping[str, Any]:
        """Give the means."""
        if not self.n_tokens:
            return {}
        mean = self.sum_new / self.n_tokens
        results = {"train/policy_confidence": math.exp(mean), "train/mean_new_logp": mean}
        if self.has_old:
            results["train/mean_old_logp"] = self.sum_old / self.n_tokens
            results["train/logp_diff_mean"] = mean - self.sum_old / self.n_tokens
            results["train/approx_kl"] = self.sum_kl / self.n_tokens
            results["train/token_kl_max"] = self.max_token_kl
            results["train/token_ratio_max"] = self.max_token_ratio
        if self.n_entropy_tokens:
            results["train/entropy"] = self.sum_entropy / self.n_entropy_tokens
        if self.n_clip:
            low, high = self.clipped / self.n_clip
            results["train/clip_ratio_low"], results["train/clip_ratio_high"] = low, high
            results["train/clip_ratio"] = low + high
        self.reset()
        return results


class GSPOMetric(GRPOMetric):
    """`GRPOMetric` whose clip rates are of sequences: their ratio is the mean of its tokens'."""

    def _units(
        self, log_ratio: Numbers, advantages: Numbers, mask: Numbers
    ) -> tuple[Numbers, Numbers | None, Numbers]:
        counts = mask.sum(1, keepdims=True)
        means = (
            np.where(mask, x, 0).sum(1, keepdims=True) / np.maximum(counts, 1)
            for x in (log_ratio, advantages)
        )
        return *means, counts > 0


class CISPOMetric(GRPOMetric):
    """`GRPOMetric` whose clip rates do not ask for the sign of the advantage."""

    def _units(
        self, log_ratio: Numbers, advantages: Numbers, mask: Numbers
    ) -> tuple[Numbers, Numbers | None, Numbers]:
        return log_ratio, None, mask


class EmbeddingMetric(Metric):
    """Similarity of anchors, whose label is 1, and the embeddings after them: `pos_sim`, `neg_sim`.

    `pos_sim` is their cosine, with `pos_sim_min` and `pos_sim_max`; `neg_sim` the mean product of
    each anchor and the other positives. With a loss, `loss` and `grad_norm` too.
    """

    def reset(self) -> None:
        """Begin anew."""
        self.similarities: list[float] = []
        self.pos_count = 0
        self.negatives: list[float] = []
        self.losses: list[float] = []
        self.grad_norm = 0.0

    def accumulate(self, inputs: Any, outputs: Any, **facts: Any) -> None:
        """Add a batch: `embeddings`, or `logits` that hold them."""
        rows = outputs.get("embeddings", outputs.get("logits"))
        if rows is None:
            return
        rows = np.asarray(rows, np.float64)
        rows = rows[:, 0] if rows.ndim == 3 else rows
        features = inputs if isinstance(inputs, list) else [inputs]
        labels = np.concatenate([np.asarray(x["labels"]).reshape(-1) for x in features])
        (numbers,) = np.nonzero(labels)
        if not numbers.size:
            return
        anchors, positives = rows[numbers], rows[numbers + 1]
        norms = np.linalg.norm(anchors, axis=1) * np.linalg.norm(positives, axis=1)
        cosines = (anchors * positives).sum(1) / np.maximum(norms, 1e-8)
        self.similarities += cosines.tolist()
        self.pos_count += len(cosines)
        products = anchors @ positives.T
        self.negatives += products[~np.eye(len(products), dtype=bool)].tolist()
        if outputs.get("loss") is not None:
            self.losses.append(float(outputs["loss"]))
        if facts.get("grad_norm") is not None:
            self.grad_norm = float(facts["grad_norm"])

    def calculate(self) -> Mapping[str, Any]:
        """Give the means."""
        results = {}
        if self.similarities:
            results["pos_sim"] = f"{np.mean(self.similarities):.4f}"
            results["pos_sim_min"] = f"{min(self.similarities):.4f}"
            results["pos_sim_max"] = f"{max(self.similarities):.4f}"
        for name, values in (("neg_sim", self.negatives), ("loss", self.losses)):
            if values:
                results[name] = f"{np.mean(values):.4f}"
        if self.grad_norm > 0:
            results["grad_norm"] = f"{self.grad_norm:.6f}"
        self.reset()
        return results


def _labels(inputs: Any) -> Numbers:
    """Stack the labels of features, or of batches of them."""
    features = inputs if isinstance(inputs, list) else [inputs]
    rows = [row for x in features for row in np.atleast_2d(np.asarray(x["labels"]))]
    return np.asarray(pad_rows(rows, IGNORE))


def _rows(values: Any) -> Numbers:
    batches = values if isinstance(values, list) else [values]
    rows = [row for x in batches for row in np.atleast_2d(np.asarray(x, np.float64))]
    return np.asarray(pad_rows(rows, 0))


def _spread(values: Any, mask: Numbers) -> Numbers:
    """Lay numbers a row, one each, one a labelled token or one a position, over the positions."""
    spread = np.zeros(mask.shape)
    for i, (row, kept) in enumerate(zip(values, mask, strict=True)):
        numbers = np.asarray(row, np.float64).reshape(-1)
        if numbers.size in (1, kept.sum()):
            spread[i, kept] = numbers
        else:
            spread[i] = numbers[: kept.size]
    return spread


@jax.jit
def _compiled_sums(log_ratio: Any, advantages: Any, mask: Any, bounds: Any) -> PolicyMetrics:
    return policy_metrics(log_ratio, advantages, mask, denominator=1.0, **bounds)


def _policy_sums(
    log_ratio: Numbers, advantages: Numbers | None, mask: Numbers, **bounds: float
) -> PolicyMetrics:
    """Call `policy_metrics` for sums instead of means, on rows of a few widths only."""
    width = bucket_size(mask.shape[1], smallest=16)
    arrays = (log_ratio, advantages, mask)
    padded = [
        None if x is None else np.asarray(pad_rows(list(x), 0, longest=width)) for x in arrays
    ]
    return _compiled_sums(*padded, bounds)


def _pairs(logps: Numbers, mask: Numbers) -> tuple[Numbers, Numbers]:
    """Sum log-probabilities over labelled tokens, of chosen and of rejected rows."""
    width = min(mask.shape[1], logps.shape[1])  # rows may be padded, or end with their labels
    sums = np.where(mask[:, :width], logps[:, :width], 0).sum(1)
    return sums[0::2], sums[1::2]
