"""Reports have a table for each suite and retriever, the best bold, and warn of few prompts."""

from __future__ import annotations

from bench_samples import entry, results, retrieving, sample

from hf_refspec.apps.bench.report import few_prompts, methods_table, report, write_report
from hf_refspec.apps.bench.summary import summaries


def cells(table: str, column: str) -> list[str]:
    head, _, *rows = (
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()
    )
    return [row[head.index(column)] for row in rows]


def table_of(*samples: dict) -> str:
    return methods_table(summaries([entry("a", list(samples))]))


def test_columns_that_are_empty_are_left_out():
    lines = table_of(sample("plain", 4, 2, 1.0, 3.0)).splitlines()
    columns = "| method | nodes | MAT | seconds | tokens/s | speed-up | of decoding | texts equal |"
    assert lines[0] == columns
    assert lines[2] == "| plain | 8 | 2.00 | 4.0 | 1.0 | 1.00 | 1.00 [1.00, 1.00] | 1 of 1 |"
    others = {"peak_bytes": 3 << 29, "drafting_seconds": 0.5, "learning_seconds": 0.25}
    on_a_gpu = table_of(sample("ours", 4, 2, 1.0, 3.0, **others))
    columns = ("memory, GiB", "drafting, µs a pass", "learning")
    assert [cells(on_a_gpu, each) for each in columns] == [["1.5"], ["250000"], ["125000"]]


def test_decoding_has_the_median_and_the_quartiles_of_the_prompts():
    def measured(tokens: int, plain: float, ours: float) -> dict:
        samples = [
            sample("plain", tokens, tokens, 1.0, plain),
            sample("ours", tokens, 4, 1.0, ours),
        ]
        return entry(str(tokens), samples)

    entries = [measured(11, 10.0, 2.0), measured(21, 20.0, 10.0), measured(1, 0.0, 0.0)]
    table = methods_table(summaries(entries))
    # 5x and 2x; an answer of one token has no decoding.
    assert cells(table, "of decoding")[1] == "**3.50 [2.75, 4.25]**"
    assert cells(table, "speed-up")[1] == f"**{33 / 15:.2f}**"


def test_the_automatic_budget_s_regret_is_beside_the_best_fixed_one():
    seconds = {"auto": 4.0, 8: 5.0, 64: 3.2}
    table = table_of(*(sample("ours", 10, 5, 0.0, s, nodes=nodes) for nodes, s in seconds.items()))
    assert cells(table, "regret") == ["+25.0%", "", ""]


def test_questions_with_categories_have_a_table_of_these():
    entries = [entry(f"{name}/1", [sample("plain", 4, 4, 1.0, 3.0)]) for name in ("a", "b")]
    text = report(results(rag=entries))
    assert "- cpu x\n- torch 2\n- model tiny\n" in text
    assert "## rag, float32\n\n2 of 3 questions.\n" in text
    assert "| method | nodes | a | b |" in text
    assert "| plain | 8 | 1.00, 1.00x | 1.00, 1.00x |" in text


def test_each_retriever_has_a_table_with_its_figures():
    samples = [retrieving("baseline", 8.0, searches=9, waiting=0.75)]
    samples.append(retrieving("ours", 2.0, searches=3, waiting=0.0, gamma=5 / 6))
    flat = report(results(**{"ralm, flat": [entry(name, samples) for name in ("a/b", "c/d")]}))
    flat = flat[flat.index("| method |") :]
    assert cells(flat, "gamma") == ["", "0.833"]
    assert cells(flat, "searches") == ["9", "3"] and cells(flat, "waiting") == ["0.75", "0"]
    assert cells(flat, "of decoding")[1] == "**4.00 [4.00, 4.00]**"


def test_several_suites_are_summed_up_for_each_dtype():
    def of_suites(dtype: str, seconds: float) -> dict:
        samples = [sample("plain", 11, 11, 1.0, 9.0), sample("ours", 11, 5, 1.0, seconds)]
        suites = {name: [entry(each, samples) for each in "ab"] for name in ("rag", "multi-turn")}
        return results(dtype, **suites)

    assert "All suites" not in report(results())
    one, other = of_suites("float32", 4.0), of_suites("bfloat16", 1.0)
    text = report({**one, "suites": one["suites"] | other["suites"]})
    float32, bfloat16 = text.partition("## All suites, bfloat16\n")[::2]
    assert "## All suites, float32\n" in float32
    assert "| plain | 8 | 1.00 | 40.0 | 1.1 | 1.00 | 1.00 [1.00, 1.00] | 4 of 4 |" in float32
    ours = "| ours | 8 | **2.20** | 20.0 | 2.2 | **2.00** | **2.25 [2.25, 2.25]** | 4 of 4 |"
    assert ours in float32
    assert "| ours | 8 | **2.20**, **5.00x** | **2.20**, **5.00x** |" in bfloat16


def test_each_text_that_differs_is_listed_with_its_margin():
    def other(place: int, steps: float) -> dict:
        difference = {"place": place, "steps": steps}
        return sample("ours", 8, 4, 1.0, 3.0, other_tokens=5, first_difference=difference)

    plain = sample("plain", 8, 8, 1.0, 3.0)
    entries = [
        entry("a", [plain, other(3, 0.0), other(3, 0.0), other(6, 2.0)]),
        entry("b", [plain, plain]),
    ]
    text = report(results("bfloat16", rag=entries))
    assert "| a | 3 | 0 | 2 |\n| a | 6 | 2 | 1 |" in text
    assert "| b |" not in text
    [ours] = [line for line in text.splitlines() if line.startswith("| ours | ")]
    assert ours.endswith("| 0 of 3 | 2 |")
    assert "margin" not in report(results(rag=entries[1:]))


def test_all_that_are_best_as_printed_are_bold_and_what_cannot_be_compared_is_not():
    table = table_of(
        sample("plain", 11, 11, 1.0, 9.0),
        sample("ours", 11, 5, 1.0, 4.0, nodes=8),
        sample("ours", 11, 5, 1.0, 4.001, nodes=16),
        sample("without retrieval", 11, 2, 0.1, 0.1, other_tokens=None),
        sample("of one token", 1, 1, 1.0, 0.0),
    )
    assert cells(table, "MAT") == ["1.00", "**2.20**", "**2.20**", "5.50", "1.00"]
    assert cells(table, "speed-up") == ["1.00", "**2.00**", "**2.00**", "50.00", "0.91"]
    assert cells(table, "of decoding")[1:3] == 2 * ["**2.25 [2.25, 2.25]**"]
    assert cells(table, "of decoding")[4] == "-"
    assert cells(table, "seconds") == ["10.0", "5.0", "5.0", "0.2", "1.0"]


def prompts(count: int) -> list[dict]:
    samples = [sample("plain", 11, 11, 1.0, 10.0), sample("ours", 11, 5, 1.0, 2.0)]
    return [entry(str(i), samples) for i in range(count)]


def test_the_warning_stands_in_the_suite_s_part():
    assert few_prompts(prompts(10)) == few_prompts([]) == ""
    some = results(rag=prompts(9), humaneval=prompts(30))
    rag, humaneval = report(some).partition("## humaneval, float32\n")[::2]
    assert "> [!WARNING]\n> Few prompts (9): " in rag and "WARNING" not in humaneval


def test_the_charts_stand_at_the_top_and_beside_it(tmp_path):
    text = write_report(results(rag=prompts(2)), tmp_path)
    assert text.splitlines()[2] == "![Speed-up in decoding over plain](speed_ups.png)"
    assert (tmp_path / "report.md").read_text(encoding="utf-8") == text
    assert {path.name for path in tmp_path.iterdir()} == {"report.md", "speed_ups.png"}
    assert "](" not in report(results())
