"""Draw speed.svg from the table "Speed" of benchmarks/RESULTS.md. Run by `make pictures`."""

import re
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot

HERE = Path(__file__).parent
MODES = (
    "synchronous/epoch",
    "asynchronous/batch",
    "asynchronous/epoch",
    "hogwild/batch",
    "hogwild/epoch",
)
LABELS = {"sparkdl": "sparkdl", "elephas": "Elephas 7.3.0"}


def warm_rates():
    """Return the rows per second of a warm fit by contestant, with SGD."""
    text = (HERE.parents[1] / "benchmarks" / "RESULTS.md").read_text()
    section = text.split("## Speed")[1].split("### SGD")[1].split("### ADAM")[0]
    rows = re.findall(
        r"^\| ([\w/ ]+?) \| [\d,]+ \[\S+\] \| ([\d,]+) \[", section, re.MULTILINE
    )
    return {name: int(rate.replace(",", "")) for name, rate in rows}


def main():
    """Draw a pair of bars for each mode, and a line for plain Keras."""
    rates = warm_rates()
    mpl.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "sparkdl",
            "font.family": "sans-serif",
        }
    )
    figure, axes = pyplot.subplots(figsize=(7.2, 3.6), layout="constrained")
    for offset, contestant, color in (
        (-0.2, "sparkdl", "#2f6fb5"),
        (0.2, "elephas", "#c3ccd6"),
    ):
        values = [rates[f"{contestant} {mode}"] for mode in MODES]
        places = [place + offset for place in range(len(MODES))]
        bars = axes.barh(places, values, 0.4, color=color, label=LABELS[contestant])
        paper = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.bar_label(
            bars,
            [f"{value:,}" for value in values],
            padding=4,
            fontsize=8,
            bbox=paper,
        )
    axes.axvline(
        rates["plain"],
        color="#b5522f",
        lw=1,
        ls="--",
        label="plain Keras, one process",
    )
    axes.set_yticks(range(len(MODES)), MODES)
    axes.invert_yaxis()
    axes.set_xlim(0, 155_000)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel(
        "rows per second: MLP on MNIST, SGD, batch 64, two workers on two cores"
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(HERE / "speed.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
