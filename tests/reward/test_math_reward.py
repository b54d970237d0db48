"""Mathematical answers: what is equal, what is not, and what must not happen while it is found."""

import os
import pathlib
import subprocess
import sys
import threading
import time

import pytest

from tests.reward.said import said
from twinkle_jax.data import read_jsonl
from twinkle_jax.reward import MathReward
from twinkle_jax.reward.math_reward import WorkerPool


@pytest.fixture(scope="module")
def reward():
    return MathReward(workers=1, timeout=60, batch_timeout=300)


SAME = [
    (r"\frac{1}{2}", "0.5"),
    ("0.5", r"\frac12"),
    ("0.5", r"$\frac{1}{2}$"),
    ("0.5", r"so it is \boxed{\frac{1}{2}}"),
    ("x=4", "4"),
    ("4", "x = 4"),
    ("(1,2)", "(1, 2)"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("1,234", "1234"),
    (r"50\%", "0.5"),
    (r"\text{A}", "A"),
    ("Tuesday", r"\text{tuesday}"),
    (r"3\sqrt{2}", r"\sqrt{18}"),
    ("[1,2)", "[1,2)"),
    ("x^2+2x+1", "(x+1)^2"),
    (r"-\frac{7}{3}", "-7/3"),
    ("10^{-3}", "0.001"),
    (r"12\text{ cm}", "12"),
]
OTHER = [
    (r"\frac{1}{23}", r"\frac{12}{3}"),  # Twinkle strips all braces
    ("B", "A"),
    ("silent", "listen"),  # as products of letters they are equal
    ("silent", r"\text{listen}"),
    ("3 or 4", "4"),
    ("1,2,3,4,5", "3"),
    ("[1,2]", "[1,2)"),
    ("6.28318", r"2\pi"),
    ("nan", "0"),
    ("", "0"),
    ("5; import os", "5 + 1"),
]


def test_what_is_equal_and_what_is_not(reward):
    pairs = SAME + OTHER
    texts = [f"\\boxed{{{answer}}}" for answer, _ in pairs]
    truths = [truth for _, truth in pairs]
    expected = [1.0] * len(SAME) + [0.0] * len(OTHER)
    assert dict(zip(pairs, reward(said(*texts), truths), strict=True)) == dict(
        zip(pairs, expected, strict=True)
    )


def test_the_last_box_counts_and_there_must_be_one(reward):
    texts = [r"\boxed{3} no, \boxed{4}", r"\boxed{4} no, \boxed{3}", "4", r"\boxed{4", ""]
    assert reward(said(*texts), ["4"]) == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_without_a_box():
    lenient = MathReward(workers=1, timeout=60, require_box=False)
    texts = ["I think\n2 + 2", "I think\n$2 + 2$.", r"\boxed{5}", "5\n\\boxed{4", ""]
    assert lenient(said(*texts), ["4"]) == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_nothing_is_nothing(reward):
    with pytest.raises(ValueError, match=r"ground_truths\[0\] must be an answer, got ''"):
        reward(said(""), [""])


def test_limits_of_length_and_nesting():
    short = MathReward(workers=1, timeout=60, max_length=5, max_nesting=2)
    texts = [r"\boxed{00004}", r"\boxed{000004}", r"\boxed{((4))}"]
    assert short(said(*texts), ["4"]) == [1.0, 0.0, 1.0]
    deep = MathReward(workers=1, timeout=60, max_nesting=2)
    texts = [r"\boxed{((4))}", r"\boxed{(((4)))}", r"\boxed{\frac{\sqrt{16}}{1}}"]
    assert deep(said(*texts), ["4"]) == [1.0, 0.0, 1.0]


def test_an_answer_that_nobody_can_read(reward):
    with pytest.raises(ValueError, match=r"ground_truths\[1\] must be an answer that math-verify"):
        reward(said(r"\boxed{1}", r"\boxed{2}"), ["1", "@@"])


def test_answers_can_be_checked_before(reward, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "answer": "1/2"}\n{"prompt": "b", "answer": "@@"}\n')
    with pytest.raises(ValueError, match="record 2 must have an 'answer' that can be read, got"):
        read_jsonl(path, check_answer=reward.can_read)
    readable = ["1/2", "Tuesday", r"\boxed{4}", "@@", r"\boxed{}", "1" * 2000]
    assert [reward.can_read(x) for x in readable] == [True, True, True, False, False, False]


PAYLOADS = [
    "__import__('os').system('touch MARK')",
    "__import__('os').mkdir('MARK')",
    "open('MARK', 'w')",
    "().__class__.__base__.__subclasses__()",
    "(lambda: open('MARK','w'))()",
    "eval(\"open('MARK','w')\")",
    "exec(\"open('MARK','w')\")",
    'f\'{open("MARK","w")}\'',
    "[open('MARK','w') for x in [1]]",
    "1 if open('MARK','w') else 2",
    "sympy.sympify(\"open('MARK','w')\")",
    "\\text{__import__('os').mkdir('MARK')}",
    "\\operatorname{open}('MARK','w')",
    "\\input{|touch MARK}",
    "\\immediate\\write18{touch MARK}",
    "`touch MARK`",
    "$(touch MARK)",
    "1; import os; os.mkdir('MARK')",
    "\\sqrt{open('MARK','w')}",
    "x = __import__('os').mkdir('MARK')",
]


def test_answers_are_never_evaluated(reward, tmp_path):
    mark = tmp_path / "mark"
    texts = [f"\\boxed{{{payload.replace('MARK', str(mark))}}}" for payload in PAYLOADS]
    assert reward(said(*texts), ["1"]) == [0.0] * len(PAYLOADS)
    assert not mark.exists() and not pathlib.Path("MARK").exists()
    assert reward(said(r"\boxed{1}"), ["1"]) == [1.0]  # nothing broke either


def test_the_worker_refuses_files_and_processes():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import os, subprocess, math_worker\n"
        "sys.addaudithook(math_worker._refuse)\n"
        "for attempt in (lambda: open(sys.argv[2], 'w'), lambda: os.mkdir(sys.argv[2]),\n"
        "                lambda: os.system('true'), lambda: subprocess.run('true')):\n"
        "    try: attempt()\n"
        "    except PermissionError: print('refused')\n"
        "print(len(open(sys.argv[3]).read()) > 0)"
    )
    folder = pathlib.Path(sys.modules["twinkle_jax.reward"].__file__).parent
    run = subprocess.run(
        [sys.executable, "-c", code, str(folder), "/nowhere/mark", __file__],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == ["refused"] * 4 + ["True"]


def test_even_a_parser_that_is_tricked_does_no_harm(tmp_path, monkeypatch):
    """A math-verify that does what an answer says, and prints: it is refused, and not read."""
    mark = tmp_path / "mark"
    (tmp_path / "math_verify.py").write_text(
        "def LatexExtractionConfig(**options): return options\n"
        "def parse(text, **options):\n"
        "    print('{}')\n"
        f"    if 'open' in text: open({str(mark)!r}, 'w')\n"
        "    return [text]\n"
        "def verify(gold, answer, timeout_seconds): return gold == answer\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    tricked = MathReward(workers=1, timeout=60)
    assert tricked(said(r"\boxed{open}", r"\boxed{4}"), ["4"]) == [0.0, 1.0]
    assert tricked(said(r"\boxed{open}"), ["open 1"]) == [0.0]
    assert not mark.exists()


def test_answers_that_take_for_ever_are_wrong():
    quick = MathReward(workers=2, timeout=1, batch_timeout=100)
    texts = [r"\boxed{100000000!}", r"\boxed{7^{10^{8}}}", r"\boxed{100000000!}", r"\boxed{2}"]
    with pytest.warns(RuntimeWarning, match="2 answers could not be compared in time"):
        assert quick(said(*texts), ["2"])[:3] == [0.0] * 3
    assert quick.timeouts == 2  # equal pairs are compared once
    patient = MathReward(workers=1, timeout=60)
    assert patient(said(r"\boxed{2}"), ["2"]) == [1.0]


def test_the_budget_of_a_batch():
    hurried = MathReward(workers=1, timeout=2, batch_timeout=2)
    texts = [rf"\boxed{{{10**8 + i}!}}" for i in range(4)]
    with pytest.warns(RuntimeWarning, match="4 answers could not be compared in time"):
        assert hurried(said(*texts), ["2"]) == [0.0] * 4


def test_when_the_budget_is_used_up_nothing_more_is_tried(tmp_path):
    script, starts = tmp_path / "worker.py", tmp_path / "starts"
    script.write_text(
        f"import json, sys\nopen({str(starts)!r}, 'a').write('x')\n"
        "print(json.dumps({'ready': True}), flush=True)\n"
        "for line in sys.stdin: pass\n"
    )
    assert WorkerPool(script, 1, 60).map([["a"]] * 5, 0.1) == [None] * 5
    assert starts.read_text() == "xx"  # one, and what replaced it


def test_threads_share_the_workers(tmp_path):
    script, starts = tmp_path / "worker.py", tmp_path / "starts"
    script.write_text(
        f"import json, sys\nopen({str(starts)!r}, 'a').write('x')\n"
        "print(json.dumps({'ready': True}), flush=True)\n"
        "for line in sys.stdin: print(json.dumps({'said': line}), flush=True)\n"
    )
    pool = WorkerPool(script, 1, 60)
    threads = [threading.Thread(target=pool.map, args=([["a"]] * 20, 60)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert starts.read_text() == "x"


def test_a_worker_that_dies_is_replaced(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(
        "import json, os, sys\n"
        "print(json.dumps({'ready': True}), flush=True)\n"
        "for line in sys.stdin:\n"
        "    word = json.loads(line)[0]\n"
        "    if word == 'die': os._exit(3)\n"
        "    print(json.dumps({'word': word, 'pid': os.getpid()}), flush=True)\n"
    )
    pool = WorkerPool(script, 1, 60)
    answers = pool.map([["a"], ["die"], ["b"]], 60)
    assert [answer and answer["word"] for answer in answers] == ["a", None, "b"]
    assert answers[0]["pid"] != answers[2]["pid"]
    (again,) = pool.map([["c"]], 60)
    assert again["pid"] == answers[2]["pid"]  # and kept
    os.kill(again["pid"], 9)
    while pool._idle[0].process.poll() is None:
        time.sleep(0.01)
    assert pool.map([["d"]], 60)[0]["word"] == "d"


def test_a_worker_that_cannot_start(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text("import json; print(json.dumps({'error': 'ImportError: no module'}))")
    with pytest.raises(RuntimeError, match=r"worker.py must start in 120 s, it said ImportError"):
        WorkerPool(script, 1, 60).map([["a"]], 60)
    script.write_text("")
    with pytest.raises(RuntimeError, match=r"worker.py must start in 120 s, it said nothing"):
        WorkerPool(script, 1, 60).map([["a"]], 60)


def test_from_several_threads_at_once(reward):
    rewards = {}

    def work(i):
        rewards[i] = reward(said(rf"\boxed{{{i}}}", r"\boxed{1}"), ["1"])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rewards == {0: [0.0, 1.0], 1: [1.0, 1.0], 2: [0.0, 1.0]}


def test_in_a_script_as_one_writes_it(tmp_path):
    """Without `if __name__ == '__main__'`; and no process is left behind."""
    script = tmp_path / "train.py"
    script.write_text(
        "from twinkle_jax.reward import MathReward\n"
        "reward = MathReward(workers=1, timeout=60)\n"
        "said = [{'messages': [{'role': 'assistant', 'content': r'\\boxed{4}'}]}]\n"
        "print(reward(said, ['2+2']), reward._pool._idle[0].process.pid)\n"
    )
    root = pathlib.Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    value, pid = run.stdout.split()
    assert value == "[1.0]" and run.stderr == ""
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match=r"math_verify must .* install 'twinkle-jax\[reward\]'"):
        MathReward()


@pytest.mark.parametrize("name", ["timeout", "batch_timeout", "workers", "max_length"])
def test_numbers_that_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be positive, got 0"):
        MathReward(**{name: 0})
    with pytest.raises(TypeError, match=f"{name} must be a number, got '5'"):
        MathReward(**{name: "5"})
