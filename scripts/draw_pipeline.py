#!/usr/bin/env python3
"""Draw README's picture, scripts/pipeline.svg: the stripe and the eight stages of a decode step."""

import argparse
import sys
from pathlib import Path
from xml.sax.saxutils import escape

PICTURE = Path(__file__).resolve().parent / "pipeline.svg"
WIDTH, HEIGHT = 800, 530
NUM_RANKS = 4
NUM_TOKENS = 12
RANK_COLORS = ("#2e7ab8", "#2a9d6f", "#d1782b", "#8f5fbf")
INK, FAINT, EDGE = "#22272e", "#5b6570", "#c3cad3"
MOVES, MOVES_EDGE = "#fdf0cf", "#dfb95c"
HEADS, NO_HEADS = "#3b4452", "#e8ebef"
NEW_TOKEN = 12  # the token of the drawn decode step: owner 0, row 3

#: Number, name, what it works on, and whether it moves data between the GPUs.
STAGES = (
    ("1", "down-proj", "every GPU", False),
    ("2", "write KV", "owner only", False),
    ("3", "q_b_proj", "own heads", False),
    ("4", "gather Q", "B x H x 576", True),
    ("5", "attend", "own stripe", False),
    ("6", "exchange", "o, lse home", True),
    ("7", "merge", "by LSE, exact", False),
    ("8", "o_proj", "all-reduce", True),
)
LANE_TOP, LANE_HEIGHT, LANE_GAP = 344, 28, 10
STAGE_LEFT, STAGE_WIDTH = 64, 91


class Svg:
    """Collects elements; coordinates are pixels from the top left corner."""

    def __init__(self) -> None:
        self.elements: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, edge: str = "none"
    ) -> None:
        """A box with slightly rounded corners."""
        box = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"'
        self.elements.append(f'<rect {box} fill="{fill}" stroke="{edge}"/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, color: str) -> None:
        """A thin line."""
        ends = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
        self.elements.append(f'<line {ends} stroke="{color}" stroke-width="1.2"/>')

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 12,
        color: str = INK,
        anchor: str = "middle",
        bold: bool = False,
    ) -> None:
        """One line of text; y is its baseline."""
        weight = ' font-weight="bold"' if bold else ""
        where = f'x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}"'
        self.elements.append(f'<text {where} fill="{color}"{weight}>{escape(text)}</text>')

    def document(self) -> str:
        """The whole file; a white ground, so that it is legible on dark pages."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
            f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="Helvetica, Arial, sans-serif">'
        )
        title = "<title>Decode context parallelism: the stripe and the decode step</title>"
        ground = f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#ffffff"/>'
        return "\n".join([head, title, ground, *self.elements, "</svg>"]) + "\n"


def heading(svg: Svg, y: float, title: str, rest: str) -> None:
    """A section's title in bold and, on the line below, what it says."""
    svg.text(16, y, title, 15, anchor="start", bold=True)
    svg.text(16, y + 19, rest, 12, FAINT, anchor="start")


def draw_stripe(svg: Svg) -> None:
    """Tokens of one request, coloured by owner, and where each GPU keeps its own."""
    rule = f"token p of a request belongs to GPU p mod {NUM_RANKS}, in row p // {NUM_RANKS} there"
    heading(svg, 28, "The stripe", f"c = {NUM_RANKS} GPUs share one copy of the KV cache: {rule}")
    left, cell, top = 128, 52, 62
    svg.text(16, top + 19, "tokens", anchor="start")
    for token in range(NUM_TOKENS):
        svg.rect(left + token * cell, top, cell - 4, 28, RANK_COLORS[token % NUM_RANKS])
        svg.text(left + token * cell + cell / 2 - 2, top + 19, str(token), color="#ffffff")
    for rank in range(NUM_RANKS):
        draw_pool(svg, rank, 128 + rank * 156, 104)
    svg.text(16, 128, "KV rows", anchor="start")
    svg.text(16, 144, "of each GPU", anchor="start")


def draw_pool(svg: Svg, rank: int, x: float, y: float) -> None:
    """The rows that one GPU holds of the request."""
    rows = NUM_TOKENS // NUM_RANKS
    svg.rect(x, y, 148, 34 + 27 * rows, "#f7f8fa", EDGE)
    svg.text(x + 74, y + 19, f"GPU {rank}", bold=True)
    for row in range(rows):
        top = y + 28 + 27 * row
        svg.text(x + 12, top + 16, f"row {row}", 11, FAINT, anchor="start")
        svg.rect(x + 58, top, 80, 23, RANK_COLORS[rank])
        svg.text(x + 98, top + 16, f"token {row * NUM_RANKS + rank}", 11, "#ffffff")


def draw_pipeline(svg: Svg) -> None:
    """One lane a GPU, one column a stage."""
    says = "The cache never moves. What moves is the query and its partial outputs: a few MB, "
    heading(svg, 260, "A decode step, in each layer", says + "whatever the context.")
    for rank in range(NUM_RANKS):
        svg.text(16, lane_middle(rank) + 4, f"GPU {rank}", anchor="start")
    for index, (number, name, works_on, moves) in enumerate(STAGES):
        left = STAGE_LEFT + index * STAGE_WIDTH
        middle = left + STAGE_WIDTH / 2
        svg.text(middle, 312, f"{number} {name}", bold=True)
        svg.text(middle, 328, works_on, 11, FAINT)
        if moves:
            draw_moves(svg, left)
        else:
            for rank in range(NUM_RANKS):
                draw_local(svg, number, left + 8, rank)


def lane_middle(rank: int) -> float:
    """y of the middle of a GPU's lane."""
    return LANE_TOP + rank * (LANE_HEIGHT + LANE_GAP) + LANE_HEIGHT / 2


def draw_moves(svg: Svg, left: float) -> None:
    """Data goes from every GPU to every GPU."""
    bottom = lane_middle(NUM_RANKS - 1) + LANE_HEIGHT / 2
    svg.rect(left + 8, LANE_TOP, STAGE_WIDTH - 16, bottom - LANE_TOP, MOVES, MOVES_EDGE)
    for source in range(NUM_RANKS):
        for target in range(NUM_RANKS):
            ends = lane_middle(source), left + STAGE_WIDTH - 18, lane_middle(target)
            svg.line(left + 18, *ends, RANK_COLORS[source])


def draw_local(svg: Svg, number: str, x: float, rank: int) -> None:
    """What one GPU does by itself in a stage."""
    width, y = STAGE_WIDTH - 16, lane_middle(rank) - LANE_HEIGHT / 2
    if number == "1":
        svg.rect(x, y, width, LANE_HEIGHT, NO_HEADS, EDGE)
        svg.text(x + width / 2, y + 18, "all B tokens", 10.5, FAINT)
    elif number == "2":
        owns = rank == NEW_TOKEN % NUM_RANKS
        svg.rect(x, y, width, LANE_HEIGHT, RANK_COLORS[rank] if owns else "#ffffff", EDGE)
        svg.text(
            x + width / 2,
            y + 18,
            f"token {NEW_TOKEN}" if owns else "-",
            10.5,
            "#ffffff" if owns else FAINT,
        )
    elif number == "5":
        svg.rect(x, y, width, LANE_HEIGHT, RANK_COLORS[rank])
        draw_heads(svg, x + 5, y + 6, width - 10, range(NUM_RANKS))
    else:
        svg.rect(x, y, width, LANE_HEIGHT, "#ffffff", EDGE)
        draw_heads(svg, x + 5, y + 6, width - 10, [rank])


def draw_heads(svg: Svg, x: float, y: float, width: float, filled: range | list[int]) -> None:
    """All query heads as one bar of a segment a GPU; `filled` segments are worked on."""
    step = width / NUM_RANKS
    for segment in range(NUM_RANKS):
        fill = HEADS if segment in filled else NO_HEADS
        svg.rect(x + segment * step, y, step - 2, LANE_HEIGHT - 12, fill)


def draw_legend(svg: Svg) -> None:
    """What colours and bars mean."""
    y = 512
    svg.rect(16, y - 12, 24, 15, RANK_COLORS[0])
    svg.text(46, y, "KV of that GPU", 11, FAINT, anchor="start")
    draw_heads(svg, 152, y - 13, 60, [1])
    svg.text(218, y, f"1/{NUM_RANKS} of the query heads", 11, FAINT, anchor="start")
    draw_heads(svg, 366, y - 13, 60, range(NUM_RANKS))
    svg.text(432, y, "all query heads", 11, FAINT, anchor="start")
    svg.rect(540, y - 12, 24, 15, MOVES, MOVES_EDGE)
    svg.text(570, y, "between GPUs (8 is SGLang's own)", 11, FAINT, anchor="start")


def draw() -> str:
    """The picture as SVG text."""
    svg = Svg()
    draw_stripe(svg)
    draw_pipeline(svg)
    draw_legend(svg)
    return svg.document()


def main(argv: list[str] | None = None) -> int:
    """Write the picture; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=PICTURE, metavar="FILE", help="default scripts/pipeline.svg"
    )
    args = parser.parse_args(argv)
    args.output.write_text(draw())
    return 0


if __name__ == "__main__":
    sys.exit(main())
