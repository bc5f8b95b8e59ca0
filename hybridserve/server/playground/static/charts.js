// Charts of the last two minutes, drawn by uPlot. Knows numbers and moments; knows nothing of an engine.

const SPAN = 120; // seconds
const HEIGHT = 74;

export class Chart {
  /** `colours`: a CSS variable for each line. `write` makes text of a value. `asDots`: what is not measured all the time. */
  constructor(box, colours, label, write, asDots = false) {
    this.box = box;
    this.colours = colours;
    this.write = write;
    this.asDots = asDots;
    this.samples = []; // [seconds, value, ...]
    box.setAttribute("role", "img");
    box.setAttribute("aria-label", label);
    this.draw();
    new ResizeObserver(() => this.plot.setSize({ width: this.width, height: HEIGHT })).observe(box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  get width() {
    return Math.max(60, this.box.clientWidth);
  }

  /** `values`: one a line, null where there is nothing to show. */
  add(seconds, values) {
    this.samples.push([seconds, ...values]);
    while (this.samples[0][0] < seconds - SPAN) this.samples.shift();
    this.plot.setData(this.data());
  }

  data() {
    const now = this.samples.at(-1)?.[0] ?? 0;
    return [
      this.samples.map((sample) => sample[0] - now),
      ...this.colours.map((_, line) => this.samples.map((sample) => sample[line + 1])),
    ];
  }

  draw() {
    this.plot?.destroy();
    const style = getComputedStyle(this.box);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = { stroke: colour("--soft"), font: `10px ${style.fontFamily}`, ticks: { show: false } };
    const grid = { stroke: colour("--line"), width: 1 };
    const options = {
      width: this.width,
      height: HEIGHT,
      padding: [6, 13, 0, 0],
      legend: { show: false },
      cursor: { show: false },
      scales: {
        x: { time: false, range: [-SPAN, 0] },
        y: { range: (_, low, high) => [0, high > 0 ? high * 1.15 : 1] },
      },
      axes: [
        { ...axis, size: 18, gap: 4, grid: { show: false }, splits: [-SPAN, -SPAN / 2, 0], values: ["", "−1 min", "now"] },
        { ...axis, size: 44, gap: 6, space: 24, grid, values: (_, ticks) => ticks.map(this.write) },
      ],
      series: [
        {},
        ...this.colours.map((name) => ({
          stroke: colour(name),
          width: 1.5,
          fill: name === this.colours[0] ? `${colour(name)}1f` : undefined,
          paths: this.asDots ? () => null : undefined,
          points: { show: this.asDots, size: 4, width: 0, fill: colour(name) },
        })),
      ],
    };
    this.plot = new uPlot(options, this.data(), this.box);
  }
}
