"""Chat templates are programs of strangers: what they may do, and where they are stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from twinkle_jax.data import ChatTemplate
from twinkle_jax.data import template as module

HELLO = [{"role": "user", "content": "hello"}]
GROW = "{% set ns = namespace(s='aa') %}{% for i in range(60) %}{% set ns.s = NEXT %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].content.__class__ }}",
        "{{ messages[0]['content']['__class__'] }}",
        "{{ messages|attr('__class__') }}",
        "{{ messages|map(attribute='__class__')|list }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ ('{0.__class__}'|attr('format'))(messages) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__ }}",
        "{{ self.__init__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(content='x') }}",
    ],
)
def test_what_is_out_of_its_reach(source):
    with pytest.raises(ValueError, match="SecurityError"):
        ChatTemplate(source).render(HELLO)


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for x in [1] recursive %}{{ loop([1, 2]) }}{% endfor %}",
        "{{ 'a' * 10000000000 }}",
        "{{ [0] * 10000000000 }}",
        "{{ 'a'|center(10000000000) }}",
        "{{ 2 ** 10000000000 }}",
        "{{ 3 ** 300000000 % 7 }}",  # computed while it is compiled
        "{{ '%999999999d' % 1 }}",
        "{{ '{:999999999}'.format(1) }}",
        GROW.replace("NEXT", "ns.s ~ ns.s"),
        GROW.replace("NEXT", "ns.s|replace('a', 'aa')"),
        # Small in memory, endless when it is shown or compared.
        GROW.replace("NEXT", "[ns.s, ns.s]") + "{{ ns.s }}",
        GROW.replace("NEXT", "{'a': ns.s, 'b': ns.s}") + "{{ ns.s|tojson }}",
        "{% set ns = namespace(x=7) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}"
        "{% endfor %}",
        "{{ range(99999)|map('replace', '1', 'b' * 1000000)|join }}",
        "{% for i in range(99999) %}{{ messages[0].content * 1000 }}{% endfor %}",
        "{% set s = 'a' * 9000000 %}{% for i in range(99999) %}{% if 'b' in s %}{% endif %}"
        "{% endfor %}",
    ],
)
def test_it_ends_and_stays_small(source):
    with pytest.raises(ValueError, match="chat_template"):
        ChatTemplate(source, timeout=0.5).render(HELLO)
    assert ChatTemplate("{{ messages[0].content }}").render(HELLO) == "hello"  # others go on


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux")
def test_memory_is_limited():
    with pytest.raises(ValueError, match="MemoryError"):
        ChatTemplate("{{ ('a' * 1500000000)|length }}").render(HELLO)


def test_the_longest_text():
    template = ChatTemplate("{{ 'a' * n }}", timeout=60)
    assert len(template.render(HELLO, n=10_000_000)) == 10_000_000
    with pytest.raises(ValueError, match="characters"):
        template.render(HELLO, n=10_000_001)


@pytest.mark.parametrize("source", ["{% for %}", "{{ 1 +", "{{ 1|absent }}"])
def test_syntax_errors(source):
    with pytest.raises(ValueError, match="chat_template"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("{{ raise_exception('roles must alternate') }}", "TemplateError: roles must alternate"),
        ("{{ absent.x }}", "UndefinedError: 'absent' is undefined"),
        ("{{ 1 / 0 }}", "chat_template"),
        ("{% include 'x' %}", "chat_template"),
        ("{% for i in range(1000000000000) %}{% endfor %}", "chat_template"),
        ("{{ 'a' + 1 }}", "chat_template"),
        ("{{ messages|tojson(default=raise_exception) }}", "chat_template"),
    ],
)
def test_errors_in_a_template(source, cause):
    with pytest.raises(ValueError, match=cause):
        ChatTemplate(source).render(HELLO)


def test_arguments_that_are_refused():
    with pytest.raises(ValueError, match="timeout"):
        ChatTemplate("", timeout=0)
    with pytest.raises(TypeError, match="messages"):
        ChatTemplate("").render([{"role": "user", "content": {1}}])


def test_what_honest_templates_use():
    source = """{%- for m in messages if m.role != 'system' -%}
    {%- if loop.first %}{{ bos_token }}{% endif -%}
    {{- '[' ~ m.role ~ '] ' + m.content | trim + (', ' if not loop.last else '.') -}}
    {%- if loop.index0 % 2 == 1 %}{% continue %}{% endif -%}
{%- endfor -%}
{%- set ns = namespace(n=messages | length) -%}
{%- generation -%}{{ ns.n * 2 }}{%- endgeneration -%}
{%- set last %}{{ messages[-1].content.split('|')[0].strip() }}{% endset -%}
{{- {'é': [1, '<']} | tojson }}{{ last | upper }}{{ strftime_now('%%') }}"""
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": " a "},
        {"role": "assistant", "content": "b|c"},
    ]
    beginning = {"bos_token": "<s>"}
    rendered = ChatTemplate(source).render(messages, **beginning)
    assert rendered == '<s>[user] a, [assistant] b|c.6{"é": [1, "<"]}B%'


def test_long_conversations_are_no_attack():
    source = "{% for m in messages %}{{ m.role + ': ' + m.content.replace('a', 'b') }}{% endfor %}"
    messages = [{"role": "user", "content": "a" * 5000}] * 200
    assert len(ChatTemplate(source).render(messages)) == 200 * 5006


def test_any_text_arrives_as_it_is():
    text = "naïve 你好 🙂\n\r\u2028\x00\ud800"  # half a surrogate pair too
    assert ChatTemplate("{{ messages[0].content }}").render([{"content": text}]) == text


def test_several_conversations_and_templates():
    first, second = ChatTemplate("{{ x }}-{{ y }}"), ChatTemplate("{{ y }}")
    assert first.render_all([{"x": 1, "y": 2}, {"x": "a"}]) == ["1-2", "a-"]
    assert second.render_all([{"y": 3}]) == ["3"] and second.render_all([]) == []
    assert first.render_all([{"x": 1, "y": 2}]) == ["1-2"]
    with pytest.raises(ValueError, match="chat_template"):
        ChatTemplate("{{ 1 / x }}").render_all([{"x": 1}, {"x": 0}])


def test_on_any_thread_at_once():
    template = ChatTemplate("{% for i in range(2000) %}{{ messages[0].content }}{% endfor %}")
    conversations = [[{"role": "user", "content": str(i)}] for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(template.render, conversations))
    assert texts == [str(i) * 2000 for i in range(4)]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers on this system")
def test_an_interrupt_leaves_no_answer_behind():
    loops = "{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}{{ n }}"
    template = ChatTemplate(loops)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            template.render(HELLO, n=90_000)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert template.render(HELLO, n=3) == "3"


def test_a_process_that_cannot_start_is_an_error(monkeypatch):
    monkeypatch.setattr(module, "_WORKER", "no/such/file.py")
    monkeypatch.setattr(module, "_process", module._Process())
    with pytest.raises(RuntimeError, match="Errno 2"):
        ChatTemplate("")


# Forks, and has no `if __name__ == "__main__"`.
SCRIPT = """
import json, multiprocessing, os
from twinkle_jax.data import ChatTemplate, template as module
template = ChatTemplate("{{ n }}")
def work(n):
    return [template.render([], n=n) for _ in range(200)] == [str(n)] * 200
with multiprocessing.get_context("fork").Pool(2) as pool:
    results = pool.map_async(work, [1, 2, 3])
    results = [work(4), *results.get()]
print(json.dumps([results, module._process.worker.process.pid]), flush=True)
ending
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("ending", ["", "os.kill(os.getpid(), 9)"])
def test_scripts_that_fork_and_their_end(ending):
    """Forked processes have processes of their own, and none is left when a script ends."""
    script = SCRIPT.replace("ending", ending)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == (-9 if ending else 0), run.stderr
    results, pid = json.loads(run.stdout)
    assert results == [True] * 4 and run.stderr == ""
    _wait_for_end(pid)


def _wait_for_end(pid):
    status = Path(f"/proc/{pid}/status")
    for _ in range(300):
        if not status.exists() or "State:\tZ" in status.read_text():
            return
        time.sleep(0.1)
    raise AssertionError(f"process {pid} is left")


def test_a_process_that_somebody_ended_is_started_again():
    template = ChatTemplate("{{ n }}")
    process = module._process.worker.process
    process.kill()
    process.wait()
    assert template.render([], n=1) == "1"


# Forks while another thread waits for an answer, whose lock nobody in the fork would release.
BUSY = """
import os, threading, time
from twinkle_jax.data import ChatTemplate
slow = ChatTemplate("{% for i in range(9999) %}{% for j in range(99) %}{% endfor %}{% endfor %}")
thread = threading.Thread(target=slow.render, args=([],))
thread.start()
time.sleep(0.02)
pid = os.fork()
if pid == 0:
    os._exit(0 if ChatTemplate("{{ 1 }}").render([]) == "1" else 1)
thread.join()
raise SystemExit(os.waitpid(pid, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks on this system")
def test_a_fork_while_another_thread_renders():
    subprocess.run([sys.executable, "-c", BUSY], check=True, timeout=120)


ESCAPED = """
import jinja2
from twinkle_jax.data import chat_template_worker as worker
worker._environment = jinja2.Environment  # as if the sandbox had a hole
worker._serve()
"""


def test_behind_the_sandbox_is_a_second_wall(tmp_path):
    escape = "{{ cycler.__init__.__globals__.__builtins__['__import__']('os').CALL }}"
    calls = {
        "system('true')": "PermissionError",
        f"open('{tmp_path / 'x'}', 65)": "PermissionError",
        "environ.copy()": None,
    }
    requests = []
    for number, call in enumerate(calls):
        requests.append({"source": escape.replace("CALL", call), "seconds": 9})
        requests.append({"template": number, "conversations": [{}], "seconds": 9})
    run = subprocess.run(
        [sys.executable, "-c", ESCAPED],
        input="".join(json.dumps(request) + "\n" for request in requests),
        env={"TZ": "UTC", "TOKEN": "secret", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    answers = [json.loads(line) for line in run.stdout.splitlines()[1:]][1::2]
    assert [answer.get("cause", "").partition(":")[0] for answer in answers[:2]] == [
        "PermissionError",
        "PermissionError",
    ]
    assert not list(tmp_path.iterdir())
    assert answers[2]["texts"] == ["{'TZ': 'UTC'}"]
