"""Twinkle's `MegatronModel`: the same policy, with Megatron's options."""

from typing import Any

from twinkle_jax.twinkle.model.transformers import TransformersModel
from twinkle_jax.twinkle.names import IGNORED


class MegatronModel(TransformersModel):
    """A [`TransformersModel`][twinkle_jax.twinkle.model.TransformersModel] with Megatron's options.

    `"default"` is AdamW in `set_optimizer`, and a cosine with warm-up in `set_lr_scheduler`, where
    its arguments are `lr_decay_steps`, `lr_warmup_steps`, `max_lr` and `min_lr`.
    """

    def __init__(self, model_id: Any, *, mixed_precision: Any = "bf16", **options: Any) -> None:
        options = {key: x for key, x in options.items() if key not in IGNORED["MegatronModel"]}
        super().__init__(model_id, mixed_precision=mixed_precision, **options)

    def set_optimizer(
        self, optimizer_cls: Any = "default", lr: float | None = None, **options: Any
    ) -> None:
        """Choose an optimizer; `"default"` is AdamW."""
        name = "AdamW" if optimizer_cls == "default" else optimizer_cls
        super().set_optimizer(name, lr, **options)

    def set_lr_scheduler(self, scheduler_cls: Any = "default", **options: Any) -> None:
        """Choose a schedule; `"default"` warms up linearly, then falls as a cosine."""
        if scheduler_cls == "default":
            steps, warmup = options.pop("lr_decay_steps"), options.pop("lr_warmup_steps", 0)
            peak, least = options.pop("max_lr", None), options.pop("min_lr", 0.0)
            group = self.group(options.get("adapter_name"))
            group.lr = group.lr if peak is None else peak
            names = {"num_warmup_steps": warmup, "num_training_steps": steps, "eta_min": least}
            scheduler_cls, options = "CosineWarmupScheduler", options | names
        super().set_lr_scheduler(scheduler_cls, **options)


MultiLoraMegatronModel = MegatronModel
