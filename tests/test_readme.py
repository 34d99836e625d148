"""The README's Python runs as printed, except for fewer rounds."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_twenty_lines_run_as_they_stand(capsys):
    [code] = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 20
    assert "/ 16" not in code  # preprocessing belongs to the data
    assert code.count("rounds=100") == 1
    exec(compile(code.replace("rounds=100", "rounds=3"), str(README), "exec"), {})
    accuracy, models, sweep = capsys.readouterr().out.split("\n", 2)
    assert 0.1 < float(accuracy) < 1
    assert float(models) == 2.0
    assert len(re.findall(r"0\.\d+", sweep)) == 4
