"""Rows of data sets: reading, mapping, filtering, mixing and writing."""

import json

import numpy as np
import pytest

from twinkle_jax.data import Rows, RowStream, mix, read_jsonl, read_rows, write_rows

NUMBERS = [{"n": n} for n in range(5)]
TABLES = [Rows, lambda rows: RowStream(lambda: rows)]


@pytest.fixture(params=TABLES, ids=["rows", "stream"])
def table(request):
    return request.param(NUMBERS)


def test_map_adds_replaces_and_removes_columns(table):
    def squares(columns):
        assert len(columns["n"]) <= 2
        return {"square": [n * n for n in columns["n"]]}

    assert list(table.map(squares, batch_size=2))[4] == {"n": 4, "square": 16}
    assert list(table.map(squares, batch_size=2, remove_columns=["n"]))[4] == {"square": 16}
    assert next(iter(table.map(lambda columns: {"n": [7] * len(columns["n"])}))) == {"n": 7}


def test_map_may_change_the_number_of_rows_where_no_column_stays(table):
    twice = table.map(lambda columns: {"n": columns["n"] * 2}, batch_size=2)
    assert [row["n"] for row in twice] == [0, 1, 0, 1, 2, 3, 2, 3, 4, 4]
    with pytest.raises(ValueError, match="columns"):
        list(table.map(lambda columns: {"m": [1]}))


@pytest.mark.parametrize("batch_size", [0, -1, None])
def test_batches_of_no_rows_are_refused(table, batch_size):
    with pytest.raises(ValueError, match="batch_size"):
        table.map(dict, batch_size=batch_size)


def test_filter(table):
    assert list(table.filter(lambda row: row["n"] > 2)) == [{"n": 3}, {"n": 4}]


def test_rows_are_copies(table):
    next(iter(table))["n"] = 9
    assert next(iter(table)) == {"n": 0}
    rows = Rows(NUMBERS)
    rows[1]["n"] = 9
    assert rows[1] == {"n": 1} and len(rows[1:3]) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_changed_in_a_row_does_not_change_the_data(stream):
    data = [{"messages": [{"content": "1"}], "ids": [1], "pair": ([1], 2)}]
    table = RowStream(lambda: data) if stream else Rows(data)
    (row,) = table
    row["messages"].append({"content": "2"})
    row["messages"][0]["content"] = "3"
    row["ids"].append(2)
    row["pair"][0].append(2)

    def answered(columns):
        columns["messages"][0].append({"content": "2"})
        return columns

    for _ in range(2):
        assert [len(row["messages"]) for row in table.map(answered)] == [2]
    assert list(table) == data == [{"messages": [{"content": "1"}], "ids": [1], "pair": ([1], 2)}]


def test_rows_are_selected_and_shuffled():
    rows = Rows([{"n": n} for n in range(5)] + [{"m": 1}])
    assert rows.column_names == ["n", "m"]
    assert list(rows.select([3, 0])) == [{"n": 3}, {"n": 0}]
    # Recorded: datasets.Dataset.from_list([{"n": n} for n in range(8)]).shuffle(seed=42)["n"]
    shuffled = Rows({"n": n} for n in range(8)).shuffle(seed=42)
    assert [row["n"] for row in shuffled] == [3, 4, 2, 7, 6, 1, 5, 0]


def test_mixing_takes_turns_until_the_first_ends_or_goes_one_by_one():
    a, b = Rows(NUMBERS), Rows([{"m": 10}, {"m": 11}])
    turns = mix([a, b], interleave=True)
    assert list(turns) == [
        {"n": 0, "m": None},
        {"n": None, "m": 10},
        {"n": 1, "m": None},
        {"n": None, "m": 11},
    ]
    assert [row["n"] for row in mix([a, b], interleave=False)] == [0, 1, 2, 3, 4, None, None]


def test_mixed_streams_are_streams():
    streams = [RowStream(lambda: NUMBERS), RowStream(lambda: [{"n": 10}])]
    for _ in range(2):  # each time anew
        assert [row["n"] for row in mix(streams, interleave=True)] == [0, 10]
    with pytest.raises(ValueError, match="tables"):
        mix([*streams, Rows(NUMBERS)], interleave=True)
    with pytest.raises(ValueError, match=r"tables .* got none"):
        mix([], interleave=False)
    one = [RowStream(lambda: [{"n": 1}]), RowStream(lambda: [{"m": 2}])]
    assert list(mix(one, interleave=False)) == [{"n": 1}, {"m": 2}]


FILES = {
    "a.jsonl": '{"n": 1, "t": "x"}\n\n{"n": 2, "t": "y"}\n',
    "b.json": '[{"n": 1, "t": "x"}, {"n": 2, "t": "y"}]',
    "c.json": '{"n": 1, "t": "x"}\n{"n": 2, "t": "y"}\n',
    "d.csv": 'n,t\n1,x\n2,"y"\n',
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("stream", [False, True])
def test_files(tmp_path, name, stream):
    (tmp_path / name).write_text(FILES[name])
    expected = [{"n": 1, "t": "x"}, {"n": 2, "t": "y"}]
    table = read_rows(tmp_path / name, stream=stream)
    assert list(table) == list(table) == expected
    assert isinstance(table, RowStream if stream else Rows)
    assert list(read_rows(tmp_path)) == expected  # a directory


def test_cells_of_csv_have_the_type_that_all_of_a_column_have(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("i,f,b,s,m\n-1,1e3,True,1_0,1\n2,.5,false,x,\n")
    first, second = read_rows(path)
    assert first == {"i": -1, "f": 1000.0, "b": True, "s": "1_0", "m": "1"}
    assert second == {"i": 2, "f": 0.5, "b": False, "s": "x", "m": ""}


def test_cells_of_csv_with_leading_zeros_are_text(tmp_path):
    (tmp_path / "a.csv").write_text("i,f,n,x\n007,00.5,0,0.5\n10,-01e3,-10,0\n")
    assert list(read_rows(tmp_path / "a.csv")) == [
        {"i": "007", "f": "00.5", "n": 0, "x": 0.5},
        {"i": "10", "f": "-01e3", "n": -10, "x": 0.0},
    ]


def test_cells_that_a_short_row_of_csv_lacks_are_none(tmp_path):
    """They were empty text, to which a reward compares, and made text of a column of numbers."""
    (tmp_path / "a.csv").write_text("q,n,t\nx,1,y\nz\nw,2,\n")
    assert list(read_rows(tmp_path / "a.csv")) == [
        {"q": "x", "n": 1, "t": "y"},
        {"q": "z", "n": None, "t": None},
        {"q": "w", "n": 2, "t": ""},
    ]


def test_a_row_of_csv_with_too_many_cells_is_named_by_its_line(tmp_path):
    (tmp_path / "a.csv").write_text('a,b\n"1\n2",3\n4,5,6\n')
    with pytest.raises(ValueError, match=r"a.csv, line 4 must have at most 2 cells, .* got 3"):
        read_rows(tmp_path / "a.csv")


def test_nested_cells_of_csv_are_json(tmp_path):
    row = {"n": 1, "messages": [{"role": "user", "content": '\xe9, "x"'}], "at": np.arange(2)}
    write_rows([row], tmp_path / "a.csv")
    (read,) = read_rows(tmp_path / "a.csv")
    assert json.loads(read["messages"]) == row["messages"]
    assert (read["n"], read["at"]) == (1, "[0, 1]")


def test_numbers_of_csv_that_a_float_does_not_hold(tmp_path):
    (tmp_path / "a.csv").write_text("id,x\n12345678901234567890,1e999\n1,2\n")
    assert read_rows(tmp_path / "a.csv")[0] == {"id": 12345678901234567890, "x": "1e999"}
    (tmp_path / "a.csv").write_text("answer,x\n9007199254740993,9007199254740992\n0.5,0.5\n")
    assert read_rows(tmp_path / "a.csv")[0] == {"answer": "9007199254740993", "x": 2.0**53}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", "{"),
        ("a.jsonl", "[1]"),
        ("a.jsonl", '{"a": 1, "a": 2}'),
        ("a.json", "[1]"),
        ("a.csv", "a\n1,2\n"),
        ("a.csv", "a,b,a\n1,2,3\n"),
        ("a.csv", f"a\n{'1' * 200_000}\n"),
        ("a.csv", 'a,b\n1,"2\n3,4\n'),
        ("a.csv", 'a,b\n"1" is one,2\n'),
        ("a.txt", "caf\xe9"),
        ("a.bin", ""),
    ],
)
def test_malformed_files_are_named(tmp_path, name, text):
    (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=name):
        read_rows(tmp_path / name)


def test_an_empty_directory_is_refused(tmp_path):
    with pytest.raises(ValueError, match=str(tmp_path)):
        read_rows(tmp_path)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_what_is_written_is_read_back(tmp_path, kind):
    if kind == "parquet":
        pytest.importorskip("pyarrow", reason="pip install 'twinkle-jax[hub]'")
    path = tmp_path / "new" / f"a.{kind}"
    write_rows(Rows([{"n": 1, "t": "ü,\n"}, {"n": 2, "t": ""}]), path, kind)
    assert list(read_rows(path)) == [{"n": 1, "t": "ü,\n"}, {"n": 2, "t": ""}]


def test_a_column_that_the_first_row_lacks_is_written(tmp_path):
    pytest.importorskip("pyarrow", reason="pip install 'twinkle-jax[hub]'")
    write_rows([{"n": None}, {"n": 1, "t": "x"}], tmp_path / "a.parquet")
    assert list(read_rows(tmp_path / "a.parquet")) == [{"n": None, "t": None}, {"n": 1, "t": "x"}]


def test_tools_in_parquet_files_have_their_own_parameters_alone(tmp_path):
    pytest.importorskip("pyarrow", reason="pip install 'twinkle-jax[hub]'")

    def tool(name, parameter):
        parameters = {"type": "object", "properties": {parameter: {"type": "string"}}}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    calls = [{"function": {"name": "find", "arguments": {"query": "JAX"}}}]
    calls += [{"function": {"name": "weather", "arguments": {"city": "Delhi"}}}]
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": calls}]
    turns = [*turns, {"role": "tool", "content": "[]"}]
    tools, path = [tool("find", "query"), tool("weather", "city")], tmp_path / "a.parquet"
    others = {"a": {"n": 1, "m": None}, "b": [{"n": 1}, {"m": 2}]}
    columns = {"prompt": turns, "completion": turns, "tools": tools, "bad": {"messages": turns}}
    write_rows([{**columns, **others}], path)
    (row,) = read_rows(path)
    assert row["tools"] == tools
    for messages in (row["prompt"], row["completion"], row["bad"]["messages"]):
        assert [x["content"] for x in messages] == ["?", None, "[]"]
        assert [x["tool_calls"] for x in messages] == [None, calls, None]
    assert row["a"] == others["a"] and row["b"] == [{"n": 1, "m": None}, {"n": None, "m": 2}]
    turns[1]["content"] = ""
    write_rows([{"prompt": turns, "tools": tools}], path)
    (trajectory,) = read_jsonl(path)
    assert trajectory["tools"] == tools and trajectory["messages"][1]["tool_calls"] == calls


def test_a_stream_is_written_over_the_file_that_it_reads(tmp_path):
    path = tmp_path / "a.jsonl"
    write_rows([{"n": 1}, {"n": 2}], path)
    write_rows(read_rows(path, stream=True).filter(lambda row: row["n"] > 1), path)
    assert path.read_text() == '{"n": 2}\n'
    for value, error in ((float("nan"), ValueError), (object(), TypeError)):
        with pytest.raises(error, match="as number 2"):
            write_rows([{"n": 1}, {"n": value}], path)
    assert path.read_text() == '{"n": 2}\n' and len(list(tmp_path.iterdir())) == 1


def test_arrays_are_written_as_lists(tmp_path):
    write_rows([{"ids": np.arange(2), "x": [np.float32(0.5)]}], tmp_path / "a.jsonl")
    assert json.loads((tmp_path / "a.jsonl").read_text()) == {"ids": [0, 1], "x": [0.5]}


@pytest.mark.parametrize(
    ("name", "kind"), [("a.CSV", None), ("a.other", "csv"), ("a.csv", "json"), ("a", None)]
)
def test_the_suffix_says_how_to_write_unless_a_kind_does(tmp_path, name, kind):
    write_rows([{"n": 1}], tmp_path / name, kind)
    expected = "n\n1\n" if "csv" in (kind, name[2:].lower()) and kind != "json" else '{"n": 1}\n'
    assert (tmp_path / name).read_text() == expected


def test_only_known_kinds_are_written(tmp_path):
    with pytest.raises(ValueError, match="kind"):
        write_rows([], tmp_path / "a", "pickle")
