"""Mathematical answers: what is equal, what is not, and what must not happen while it is found."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.reward import completions
from twinkle_jax.data import read_jsonl
from twinkle_jax.reward import GSM8KAccuracyReward, MathReward


@pytest.fixture(scope="module")
def reward():
    return MathReward(workers=1, timeout=60, batch_timeout=300)


def boxed(*answers):
    return completions(*(rf"\boxed{{{answer}}}" for answer in answers))


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
    ("y=x", "x"),  # one letter is no word
    ("(A)", "A"),
    ("-007", "-7"),
    ("-0", "0"),
    ("1" * 999, "1" * 999),
    ("Tuesday, Friday", r"\text{friday, tuesday}"),
    (r"\text{no}", "no"),
    ("101_{2}", "101_2"),
    ("x = 2 + 3 = 5", "5"),
    (r"1\,234\,567", "1234567"),
    ("1234", r"1\,234"),
    (r"1\ 234~567", r"1\;234\:567"),
    ("1 234", "1234"),
    ("12\u202f345", "12 345"),
    ("x = -1 234 567.5", "-1234567.5"),
    ("(1 234, 5)", "(1234, 5)"),
    ("E", r"\text{(E)}"),
    (r"6.63\times 10^{-34}", r"6.626\cdot 10^{-34}"),
    ("x = 0.00000012", r"1.2\times 10^{-7}"),
    ("0.00000012", r"x = \frac{12}{10^8}"),
    ("0.001235", r"\frac{1}{810}"),
    (r"0.00005\%", "0.0000005"),
    ("(0.00000012, x)", r"(1.2\cdot 10^{-7}, x)"),
    (r"\{0.00000013, 0.00000012\}", r"\{\frac{12}{10^8}, \frac{13}{10^8}\}"),
    ("[0, 0.00000012)", r"[0, 1.2\cdot 10^{-7})"),
    (r"\textbf{(E)}", r"\text{E}"),
    (r"\text{(A), (C)}", r"\text{C, A}"),
    (r"\left(1e-07, 2\right)", "(0.0000001, 2)"),
    ("[0, 3e2)", "[0, 300)"),
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
    (r"6.63\times 10^{-34}", r"1.6\times 10^{-19}"),  # both 0 to six decimal places
    ("0.00000012", "0.00000013"),
    ("0.0", "10^{-8}"),
    ("x = 0.00000012", "x = 0.00000013"),
    ("(0.00000012, x)", "(0.00000013, x)"),
    ("(0.00000013, 0.00000012)", "(0.00000012, 0.00000013)"),
    ("(1e-07, 2)", "(2e-07, 2)"),
    (r"\{0.00000012, 1\}", r"\{0.00000013, 1\}"),
    ("[0, 0.00000012)", "[0, 0.00000013)"),
    (r"\begin{pmatrix}0.00000012\\1\end{pmatrix}", r"\begin{pmatrix}0.00000013\\1\end{pmatrix}"),
    ("nan", "0"),
    ("", "0"),
    ("5; import os", "5 + 1"),
    ("7", "-7"),
    ("1" * 999, "1" * 998 + "2"),
    ("101_{3}", "101_2"),
    ("2 + 2 = 5", "5"),
    ("2 + 2 = 5 = 5", "5"),
    ("3e2", "3"),
    ("1e999999", "1"),
    (r"1\,23", "123"),
    (r"1\,2345", "12345"),
    (r"5\ 000", "0"),  # math-verify multiplies
    ("5 000", "0"),
    ("2 125/1000", "2.125"),  # not 2125/1000
    ("1234 567", "1234567"),
    ("(A)", r"\text{(E)}"),
    (r"f(e)", r"\text{fe}"),
]


def test_what_is_equal_and_what_is_not(reward):
    pairs = SAME + OTHER
    texts = [f"\\boxed{{{answer}}}" for answer, _ in pairs]
    truths = [truth for _, truth in pairs]
    expected = [1.0] * len(SAME) + [0.0] * len(OTHER)
    assert dict(zip(pairs, reward(completions(*texts), truths), strict=True)) == dict(
        zip(pairs, expected, strict=True)
    )


PAGE = pathlib.Path(__file__).parents[2] / "docs/data_and_rewards.md"
ROWS = [
    [cell.strip().strip("`") for cell in line.strip("|\n").split("|")][:5]
    for line in PAGE.read_text().splitlines()
    if re.match(r"\| `.*`( \| [01]){3} \|", line)
]


@pytest.mark.parametrize("reader", ["MathReward", "math-verify", "GSM8KAccuracyReward"])
def test_the_table_in_the_documentation(reward, reader):
    assert len(ROWS) == 32
    column = {"MathReward": 2, "math-verify": 3, "GSM8KAccuracyReward": 4}[reader]
    texts, truths = boxed(*(row[0] for row in ROWS)), [row[1] for row in ROWS]
    if reader == "math-verify":
        from math_verify import parse, verify

        pairs = zip(texts, truths, strict=True)
        values = [
            verify(parse(f"${truth}$"), parse(text["messages"][0]["content"]))
            for text, truth in pairs
        ]
    else:
        values = (reward if reader == "MathReward" else GSM8KAccuracyReward())(texts, truths)
    rows = [(answer, truth, int(x)) for (answer, truth, *_), x in zip(ROWS, values, strict=True)]
    assert rows == [(row[0], row[1], int(row[column])) for row in ROWS]


def test_the_number_of_workers_is_an_int():
    for workers in (2.5, "2", True):
        with pytest.raises(TypeError, match="workers"):
            MathReward(workers=workers)


def test_integers_and_words_need_no_process():
    reward = MathReward(workers=1)
    assert reward(boxed("7", "-7", "yes"), ["7", "7", "yes"]) == [1.0, 0.0, 1.0]
    assert reward._process.worker.process is None


def test_the_last_box_counts_and_there_must_be_one(reward):
    texts = [r"\boxed{3} no, \boxed{4}", r"\boxed{4} no, \boxed{3}", "4", r"\boxed{4", ""]
    assert reward(completions(*texts), ["4"]) == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_without_a_box():
    lenient = MathReward(workers=1, timeout=60, require_box=False)
    texts = ["I think\n2 + 2", "I think\n$2 + 2$.", r"\boxed{5}", "5\n\\boxed{4", ""]
    assert lenient(completions(*texts), ["4"]) == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_nothing_is_nothing(reward):
    with pytest.raises(ValueError, match=r"ground_truths\[0\]"):
        reward(completions(""), [""])


def test_limits_of_length_and_nesting():
    short = MathReward(workers=1, timeout=60, max_length=5, max_nesting=2)
    texts = [r"\boxed{00004}", r"\boxed{000004}", r"\boxed{((4))}"]
    assert short(completions(*texts), ["4"]) == [1.0, 0.0, 1.0]
    deep = MathReward(workers=1, timeout=60, max_nesting=2)
    texts = [r"\boxed{((4))}", r"\boxed{(((4)))}", r"\boxed{\frac{\sqrt{16}}{1}}"]
    assert deep(completions(*texts), ["4"]) == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("text", ["$" + " " * 20_000 + "x", "$" * 20_000 + "x", "$ x" * 9_000])
def test_long_answers_take_no_time(text):
    begin = time.process_time()
    assert MathReward(workers=1)(boxed(text), ["4"]) == [0.0]
    assert time.process_time() - begin < 1


def test_an_answer_that_nobody_can_read(reward):
    with pytest.raises(ValueError, match=r"ground_truths\[1\]"):
        reward(completions(r"\boxed{1}", r"\boxed{2}"), ["1", "@@"])


def test_answers_can_be_checked_before(reward, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "answer": "1/2"}\n{"prompt": "b", "answer": "@@"}\n')
    with pytest.raises(ValueError, match=r"record 2 .*'answer'.*@@"):
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
    assert reward(completions(*texts), ["1"]) == [0.0] * len(PAYLOADS)
    assert not mark.exists() and not pathlib.Path("MARK").exists()
    assert reward(boxed("1.5"), ["1.5"]) == [1.0]  # nothing broke either


def run_worker(code):
    """Run code beside the worker's module, in a process of its own."""
    folder = pathlib.Path(sys.modules["twinkle_jax.reward"].__file__).parent
    start = f"import sys; sys.path.insert(0, {str(folder)!r}); import math_worker, os, signal\n"
    return subprocess.Popen([sys.executable, "-c", start + code], stdout=subprocess.PIPE, text=True)


def test_the_worker_refuses_files_and_processes():
    worker = run_worker(
        "import subprocess; sys.addaudithook(math_worker.refuse)\n"
        "for attempt in (lambda: open('/nowhere/mark', 'w'), lambda: os.mkdir('/nowhere/mark'),\n"
        "                lambda: os.system('true'), lambda: subprocess.run('true')):\n"
        "    try: attempt()\n"
        "    except PermissionError: print('refused')\n"
        "print(len(open(math_worker.__file__).read()) > 0)"
    )
    assert worker.communicate()[0].split() == ["refused"] * 4 + ["True"]


def test_arithmetic_in_c_is_ended_at_once():
    worker = run_worker(
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(15))  # as pebble does\n"
        "math_worker.prepare_worker(); print('ready', flush=True); 7 ** 10**8"
    )
    assert worker.stdout.readline() == "ready\n"
    worker.terminate()
    worker.communicate()
    assert worker.returncode == -signal.SIGTERM


@pytest.mark.slow
def test_a_worker_whose_parents_were_killed_ends_by_its_processor_time():
    worker = run_worker("math_worker.compare('100000000!', '2', 1.0)")
    worker.communicate(timeout=300)
    assert worker.returncode == -signal.SIGXCPU


FAKE = """
import os, sys, time
def LatexExtractionConfig(**options): return options
def parse(text, **options):
    print('["equal"]')
    print("what a library warns of", file=sys.stderr)
    if "open" in text: open(MARK, "w")
    if "die" in text: os._exit(3)
    if "wait" in text: time.sleep(60)
    if "memory" in text: bytearray(3 << 30)
    return [text]
def verify(gold, answer, timeout_seconds): return gold == answer
"""


@pytest.fixture
def fake_math_verify(tmp_path, monkeypatch):
    """A math-verify that does what an answer says, and prints; the file that it may not write."""
    mark = tmp_path / "mark"
    (tmp_path / "math_verify.py").write_text(FAKE.replace("MARK", repr(str(mark))))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return mark


def processes_of(reward):
    """The process that the reward asks, and the workers below it, by their parents in /proc."""
    if not pathlib.Path("/proc/self/stat").exists():
        pytest.skip("needs /proc")
    server = reward._process.worker.process.pid
    parents = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended meanwhile
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    return server, [pid for pid, parent in parents.items() if parents.get(parent) == server]


def gone(group):
    """Whether all processes of a group end within some seconds."""
    for _ in range(200):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_even_a_parser_that_is_tricked_does_no_harm(fake_math_verify):
    tricked = MathReward(workers=1, timeout=60)
    assert tricked(boxed("open", "4.5"), ["4.5"]) == [0.0, 1.0]  # and what it prints is not read
    assert tricked(boxed("open"), ["open 1"]) == [0.0]
    assert not fake_math_verify.exists()


def test_a_worker_that_dies_costs_its_answer_alone(fake_math_verify):
    reward = MathReward(workers=1, timeout=60)
    with pytest.warns(RuntimeWarning, match="1 answers"):
        assert reward(boxed("1.5", "die 1", "1.5 ", "2", "3"), ["1.5"]) == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert reward.timeouts == 1
    assert reward(boxed("1.5"), ["1.5"]) == [1.0]


@pytest.mark.slow
def test_an_answer_that_waits_is_given_up(fake_math_verify):
    reward = MathReward(workers=1, timeout=3, batch_timeout=300)
    with pytest.warns(RuntimeWarning, match="1 answers"):
        assert reward(boxed("wait 1"), ["wait 1"]) == [0.0]
    assert reward(boxed("1.5"), ["1.5"]) == [1.0]


def test_memory_is_limited(fake_math_verify):
    reward = MathReward(workers=1, timeout=60)
    assert reward(boxed("1.5", "memory"), ["1.5"]) == [1.0, 0.0]
    _, before = processes_of(reward)
    assert reward(boxed("memory 2"), ["memory 2"]) == [0.0]  # an error of the answer alone
    assert processes_of(reward)[1] == before
    assert reward.timeouts == 0


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["server", "worker"])
def test_idle_processes_that_are_killed_are_replaced(fake_math_verify, victim):
    reward = MathReward(workers=1, timeout=60)
    assert reward(boxed("1.5"), ["1.5"]) == [1.0]
    server, workers = processes_of(reward)
    os.kill(server if victim == "server" else workers[0], signal.SIGKILL)
    assert reward(boxed("1.5"), ["1.5"]) == [1.0]
    time.sleep(1)  # the pool has noticed by now, if it had not yet
    assert reward(boxed("1.5", "2"), ["1.5"]) == [1.0, 0.0]
    assert reward.timeouts == 0


@pytest.mark.slow
def test_after_a_budget_is_used_up(fake_math_verify):
    reward = MathReward(workers=1, timeout=60, batch_timeout=0.5)
    with pytest.warns(RuntimeWarning, match="5 answers"):
        assert reward(boxed(*(f"wait {i}" for i in range(5))), ["1.5"]) == [0.0] * 5
    assert reward(boxed("1.5"), ["1.5"]) == [1.0]


@pytest.mark.slow
def test_an_interrupted_call_is_not_answered_later(fake_math_verify):
    reward = MathReward(workers=1, timeout=60)
    assert reward(boxed("1.5"), ["1.5"]) == [1.0]
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            reward(boxed("wait 1"), ["wait 1"])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert reward(boxed("1.5", "2"), ["1.5"]) == [1.0, 0.0]


@pytest.mark.slow
def test_a_reward_that_is_dropped_leaves_no_process(fake_math_verify):
    reward = MathReward(workers=2, timeout=60)
    assert reward(boxed("1.5"), ["1.5"]) == [1.0]
    group, _ = processes_of(reward)
    del reward
    assert gone(group)


def test_a_worker_that_cannot_start(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text("raise ImportError('half installed')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="math-verify"):
        MathReward(workers=1)(boxed("1.5"), ["1.5"])


@pytest.mark.slow
def test_answers_that_take_for_ever_are_wrong():
    quick = MathReward(workers=2, timeout=1, batch_timeout=100)
    texts = [r"\boxed{100000000!}", r"\boxed{7^{10^{8}}}", r"\boxed{100000000!}", r"\boxed{2.5}"]
    with pytest.warns(RuntimeWarning, match="2 answers"):
        assert quick(completions(*texts), ["2.5"])[:3] == [0.0] * 3
    assert quick.timeouts == 2  # equal pairs are compared once
    patient = MathReward(workers=1, timeout=60)
    assert patient(boxed("2.5"), ["2.5"]) == [1.0]


def test_from_several_threads_at_once(reward):
    with ThreadPoolExecutor(3) as pool:
        rewards = pool.map(lambda i: reward(boxed(f"{i}.5", "1.5"), ["1.5"]), range(3))
        assert list(rewards) == [[0.0, 1.0], [1.0, 1.0], [0.0, 1.0]]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), 9)"])
def test_in_a_script_as_one_writes_it(tmp_path, end):
    """Without `if __name__ == '__main__'`; and no process is left behind, however it ends."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os\n"
        "from twinkle_jax.reward import GSM8KAccuracyReward, MathReward\n"
        "reward = MathReward(workers=2, timeout=60)\n"
        "completion = {'role': 'assistant', 'content': r'\\boxed{4}'}\n"
        "value = reward([{'messages': [completion]}], ['2+2'])\n"
        "print(value, reward._process.worker.process.pid, flush=True)\n" + end
    )
    root = pathlib.Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert (run.returncode, run.stderr) == (-9 if end else 0, "")
    value, group = run.stdout.split()
    assert value == "[1.0]"
    assert gone(int(group))


@pytest.mark.parametrize("package", ["math_verify", "pebble"])
def test_the_extra_is_named(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"{package} .*twinkle-jax\[reward\]"):
        MathReward()


@pytest.mark.parametrize("name", ["timeout", "batch_timeout", "workers", "max_length"])
def test_numbers_that_are_refused(name):
    with pytest.raises(ValueError, match=name):
        MathReward(**{name: 0})
    with pytest.raises(TypeError, match=name):
        MathReward(**{name: "5"})
