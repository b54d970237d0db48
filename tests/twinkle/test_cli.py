"""Twinkle's settings of scripts."""

import pytest

from twinkle_jax.twinkle.cli import CLI


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_defaults():
    args = CLI.from_args([])
    assert (args.model.model_id, args.training.batch_size, args.loss.beta) == (None, 8, 0.1)
    assert args.get_lora_args() == {
        "target_modules": "all-linear",
        "r": 8,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
    }
    assert args.get_dataset_args()["split"] == "train" and "revision" not in args.to_dict()
    assert args.get_optimizer_args()["lr"] == 1e-5
    assert "model_id" not in args.get_model_args() and "model_id" not in args.get_rl_args()


@pytest.mark.parametrize(("given", "other"), [("model", "template"), ("template", "model")])
def test_model_and_template_take_each_others_checkpoint(given, other):
    args = CLI.from_args([])
    getattr(args, given).model_id = "a"
    both = args.get_model_args(), args.get_template_args()
    assert [known["model_id"] for known in both] == ["a", "a"]
    getattr(args, other).model_id = "b"
    assert getattr(args, f"get_{other}_args")()["model_id"] == "b"
    assert "model_id" not in args.get_dataset_args()


def test_flags_of_every_form():
    flags = (
        "--Model-ID x --lr=1e-4 --padding_free --no-trust-remote-code --max_new_tokens 16 "
        "--lora_target_modules q_proj,v_proj --batch_size 1e1 --template_model_id t --rank 3 "
        "--use_megatron true word --eta_min 1"
    )
    args = CLI.from_args(flags.split())
    assert args.model.model_id == "x" and args.template.model_id == "t"
    assert args.optimizer.learning_rate == 1e-4 and type(args.scheduler.eta_min) is float
    assert args.training.padding_free is True and args.model.trust_remote_code is False
    assert args.sampling.max_tokens == 16 and args.training.batch_size == 10
    assert args.lora.lora_target_modules == ["q_proj", "v_proj"]
    assert args.model.strategy == "native_fsdp" and args.extra == {"rank": 3}
    assert args.get("lr") == args["learning_rate"] == 1e-4 and args.get("rank") == args["rank"] == 3
    assert args.get("none", 5) == 5
    with pytest.raises(KeyError):
        args["none"]
    with pytest.raises(AttributeError):
        args.get_none_args()


def test_numbers_are_of_the_type_of_their_default(elsewhere):
    """`--max_steps 1e3` was 1000.0, which no loop takes."""
    args = CLI.from_args(["--max_steps", "1e3", "--save_steps=7.0", "--lr", "1"])
    counts = [args.training.max_steps, args.training.save_steps]
    assert counts == [1000, 7] and [type(x) for x in counts] == [int, int]
    assert type(args.optimizer.learning_rate) is float
    for flags in (["--max_steps", "10.5"], ["--max_steps"], ["--lr", "fast"], ["--seed", "1e999"]):
        name = {"lr": "learning_rate"}.get(flags[0][2:], flags[0][2:])
        with pytest.raises(ValueError, match=f"^{name} must be"):
            CLI.from_args(flags)


def test_text_stays_text():
    """A system prompt with a comma was a list, and a directory named by a month a number."""
    flags = ["--default_system", "Be brief, please.", "--output_dir=2024_11", "--model_id", "007"]
    args = CLI.from_args([*flags, "--subset_name", "1e3", "--tokenizer_id", "none"])
    assert args.template.default_system == "Be brief, please."
    assert (args.training.output_dir, args.model.model_id) == ("2024_11", "007")
    assert (args.dataset.subset_name, args.model.tokenizer_id) == ("1e3", None)


def test_later_sources_win(elsewhere, monkeypatch):
    (elsewhere / ".env").write_text('# note\nMAX_STEPS="1"\nBATCH_SIZE=1\nLORA_R=1\nMODE=ray\n')
    monkeypatch.setenv("TWINKLE_BATCH_SIZE", "2")
    monkeypatch.setenv("LORA_R", "2")
    monkeypatch.setenv("TWINKLE_OTHER", "none")
    monkeypatch.setenv("TWINKLE_JAX_EXAMPLES", "3")  # of this package's tests
    monkeypatch.setenv("SAVE_STEPS", "8")
    monkeypatch.setenv("TWINKLE_SAVE_STEPS", "7")
    pytest.importorskip("yaml", reason="pip install 'twinkle-jax[training]'")
    (elsewhere / "c.yaml").write_text(
        "lora:\n  r: 3\nlora_r: 3\nrl:\n  gkd_beta: 1\nmax_lr: 1e-4\nmine: -2E3\n"
    )
    args = CLI.from_args(["--config", "c.yaml", "--mode", "local"])
    assert args.training.max_steps == 1 and args.training.batch_size == 2 and args.lora.lora_r == 3
    assert args.training.save_steps == 7  # a name with the prefix is meant
    assert args.rl.gkd_beta == 1.0 and args.infra.mode == "local"
    assert args.scheduler.max_lr == 1e-4 and args.extra["mine"] == -2000.0
    assert "other" in args.extra and args.extra["other"] is None
    assert "jax_examples" not in args.extra
    with pytest.raises(FileNotFoundError, match="config"):
        CLI.from_args(["--config", "d.yaml"])
