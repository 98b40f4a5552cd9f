"""README's picture is what its script draws, and it draws the real layout."""

import importlib.util
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType

import pytest

from sglang_dcp.layout import owner, physical_row

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("drawing", ROOT / "scripts/draw_pipeline.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_committed_picture_is_what_the_script_draws(script: ModuleType, tmp_path: Path) -> None:
    assert script.PICTURE == ROOT / "scripts/pipeline.svg"
    written = tmp_path / "picture.svg"
    command = [sys.executable, str(ROOT / "scripts/draw_pipeline.py"), "--output", str(written)]
    subprocess.run(command, check=True, timeout=60)
    assert written.read_bytes() == script.PICTURE.read_bytes()
    assert written.read_text().isascii()


def test_everything_lies_on_the_page(script: ModuleType) -> None:
    boxes = list(ElementTree.fromstring(script.draw()).iter("{http://www.w3.org/2000/svg}rect"))
    assert len(boxes) > 50
    for box in boxes:
        x, y, width, height = (float(box.get(k, 0)) for k in ("x", "y", "width", "height"))
        assert 0 <= x <= x + width <= script.WIDTH
        assert 0 <= y <= y + height <= script.HEIGHT


def test_tokens_lie_where_the_layout_puts_them(script: ModuleType) -> None:
    for rank in range(script.NUM_RANKS):
        svg = script.Svg()
        script.draw_pool(svg, rank, 0, 0)
        texts = re.findall(r">([^<]+)</text>", svg.document())
        rows = dict(zip(texts[1::2], texts[2::2], strict=True))
        tokens = [t for t in range(script.NUM_TOKENS) if owner(t, script.NUM_RANKS) == rank]
        assert rows == {f"row {physical_row(t, script.NUM_RANKS)}": f"token {t}" for t in tokens}
