"""Chat templates are programs of strangers: what they may do, and where they are stopped."""

import threading

import pytest

from twinkle_jax.data import ChatTemplate

HELLO = [{"role": "user", "content": "hello"}]
# A SecurityError is ours, before memory is used up; a MemoryError would be the machine's.
# And it comes before the time is up, by then a text could be of any size.
REFUSED = (
    "chat_template must stay within its sandbox and limits, "
    "got (SecurityError: (?!too much time)|RecursionError)"
)
GROW = "{% set ns = namespace(s='aa') %}{% for i in range(60) %}GROW{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].content.__class__ }}",
        "{{ messages[0]['content']['__class__'] }}",
        "{{ messages|attr('__class__') }}",
        "{{ messages|map(attribute='__class__')|list }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ ('{0.__class__}'|attr('format'))(messages) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__ }}",
        "{{ self.__init__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(content='x') }}",
        "{{ messages|tojson(default=raise_exception) }}",
    ],
)
def test_what_is_out_of_its_reach(source):
    with pytest.raises(ValueError, match=REFUSED):
        ChatTemplate(source).render(HELLO)
    assert HELLO == [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
        "{% for i in range(1000000000000) %}{% endfor %}",
        "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for x in [1] recursive %}{{ loop([1, 2]) }}{% endfor %}",
        "{{ 'a' * 10000000000 }}",
        "{{ [0] * 10000000000 }}",
        "{{ 'a'.ljust(10000000000) }}",
        "{{ 'a'|center(10000000000) }}",
        "{{ 2 ** 10000000000 }}",
        "{{ '%999999999d' % 1 }}",
        GROW.replace("GROW", "{% set ns.s = ns.s ~ ns.s %}"),
        GROW.replace("GROW", "{% set ns.s = ns.s + ns.s %}"),
        GROW.replace("GROW", "{% set ns.s = [ns.s, ns.s]|join %}"),
        GROW.replace("GROW", "{% set ns.s = ns.s.replace('a', 'aa') %}"),
        GROW.replace("GROW", "{% set ns.s = ns.s|replace('a', 'aa') %}"),
        GROW.replace("GROW", "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}"),
        GROW.replace("GROW", "{% set ns.s = ns.s * 7 %}"),
        "{{ range(99999)|map('replace', '1', 'b' * 1000000)|join }}",
        "{% for i in range(99999) %}{{ messages[0].content * 1000 }}{% endfor %}",
    ],
)
def test_it_ends_and_stays_small(source):
    with pytest.raises(ValueError, match=REFUSED):
        ChatTemplate(source).render(HELLO)


def test_numbers_do_not_grow_without_end():
    squares = "{% set ns = namespace(x=7) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}"
    with pytest.raises(ValueError, match=REFUSED):
        ChatTemplate(squares + "{% endfor %}").render(HELLO)


@pytest.mark.parametrize("source", ["{% for %}", "{{ 1 +", "{{ '%d'|format(1) }}"])
def test_what_is_no_template(source):
    with pytest.raises(ValueError, match="chat_template must be a Jinja template, got Template"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "TemplateError: roles must alternate"),
        ("{{ absent.x }}", "UndefinedError: 'absent' is undefined"),
    ],
)
def test_what_the_template_refuses(source, said):
    with pytest.raises(ValueError, match=f"messages must suit the chat template, got {said}"):
        ChatTemplate(source).render(HELLO)


@pytest.mark.parametrize("source", ["{{ 1 / 0 }}", "{% include 'x' %}", "{{ 'a' + 1 }}"])
def test_what_goes_wrong_in_it(source):
    with pytest.raises(ValueError, match="chat_template must suit the messages, got "):
        ChatTemplate(source).render(HELLO)


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


def test_on_any_thread_at_once():
    template = ChatTemplate("{% for i in range(2000) %}{{ messages[0].content }}{% endfor %}")
    seen = {}

    def work(i):
        seen[i] = template.render([{"role": "user", "content": str(i)}])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {i: str(i) * 2000 for i in range(4)}


def test_time_is_limited_too():
    from twinkle_jax.data.sandbox.budget import Budget
    from twinkle_jax.data.sandbox.environment import Sandbox, compile_within, render

    template = compile_within(Sandbox(), "{% for i in range(9) %}{% endfor %}", Budget(99, 99, 60))
    assert render(template, {}, lambda: Budget(99, 99, 60)) == ""
    with pytest.raises(Exception, match="too much time"):
        render(template, {}, lambda: Budget(99, 99, -1))
    with pytest.raises(Exception, match="too many steps"):
        render(template, {}, lambda: Budget(8, 99, 60))
