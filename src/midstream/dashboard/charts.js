// Charts over time and the lanes of swaps, drawn by uPlot. Owns: how numbers, times and stages look.
// Always holds: a counter that fell belongs to a replica that began anew, so no rate is drawn over that.

export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const COLORS = 8;
export const colorOf = (number) => css(`--c${number % COLORS}`);
const DASHES = [[], [8, 4], [2, 3], [12, 3, 2, 3]];

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e4) return new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 }).format(value);
  return size >= 100 ? String(Math.round(value)) : String(Number(value.toPrecision(digits)));
}
export const share = (value) => (value === null || value === undefined ? "–" : `${number(value * 100)} %`);
export function bytes(value) {
  if (value === null || value === undefined) return "–";
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (value >= size) return `${number(value / size)} ${unit}`;
  return `${value} B`;
}
export const clock = (at) => (at ? new Date(at * 1000).toLocaleTimeString([], { hour12: false }) : "–");

// When a swap ended, or the newest sample's time while it goes on.
export function endOf(swap, samples) {
  const [stage, at] = swap.stages.at(-1);
  return stage === "idle" || stage === "error" ? at : Math.max(at, samples.times.at(-1) ?? at);
}

// At most so many samples are drawn: 15 minutes.
const KEPT = 450;

export class Samples {
  constructor() { this.clear(); }
  clear() { this.all = []; }
  add(samples) { this.all = [...this.all, ...samples].slice(-KEPT); }
  get replicas() { return [...new Set(this.all.flatMap((one) => Object.keys(one[1])))].sort(); }
  get times() { return this.all.map((one) => one[0]); }
  // Of a replica's gauge.
  gauge(replica, index) { return this.all.map((one) => one[1][replica]?.[index] ?? null); }
  // Of a replica's counter, a second.
  rate(replica, index) {
    return this.#rates((one) => one[1][replica]?.[index], (one) => one[1][replica]?.[7]);
  }
  // Of a count of the gateways, a second.
  counted(index) { return this.#rates((one) => one[index] ?? undefined, (one) => one[6]); }
  total(of) {
    return this.all.map((_, at) => {
      const found = of.map((values) => values[at]).filter((value) => value !== null);
      return found.length ? found.reduce((a, b) => a + b, 0) : null;
    });
  }
  #rates(value, boot) {
    return this.all.map((one, at) => {
      const before = this.all[at - 1];
      if (!before || value(one) === undefined || value(before) === undefined || boot(one) !== boot(before)) return null;
      const [more, seconds] = [value(one) - value(before), one[0] - before[0]];
      return more < 0 || seconds <= 0 ? null : more / seconds;
    });
  }
}

const PLOTS = [
  { name: "Tokens a second", unit: "tokens/s", lines: (s) => [
    ["generated", s.total(s.replicas.map((r) => s.rate(r, 0)))], ["prompt", s.total(s.replicas.map((r) => s.rate(r, 1)))],
    ["prompt, cached", s.total(s.replicas.map((r) => s.rate(r, 2)))]] },
  { name: "Signals behind the newest", unit: "signals", lines: (s) => s.replicas.map((r) => [r, s.gauge(r, 6)]), steps: true },
  { name: "Sequences", unit: "sequences", lines: (s) => [
    ["running", s.total(s.replicas.map((r) => s.gauge(r, 3)))], ["waiting", s.total(s.replicas.map((r) => s.gauge(r, 4)))]] },
  { name: "KV cache in use", unit: "% of blocks", lines: (s) => s.replicas.map((r) => [r, s.gauge(r, 5).map((v) => v === null ? null : v * 100)]) },
  { name: "Requests a second", unit: "requests/s", lines: (s) => [["answered", s.counted(2)], ["failed", s.counted(3)], ["cut short", s.counted(4)]] },
  { name: "Sessions", unit: "sessions", lines: (s) => [["known", s.all.map((one) => one[5])]], steps: true },
];

function axes(unit) {
  const line = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line") }, font: "11px system-ui" };
  return [{ ...line }, { ...line, size: 56, values: (_, values) => values.map((v) => number(v)), label: unit, labelSize: 16, labelFont: "11px system-ui" }];
}

export class Charts {
  constructor(place) { this.place = place; this.drawn = []; }
  draw(samples, anew = false) {
    PLOTS.forEach((plot, at) => {
      const lines = plot.lines(samples);
      const names = lines.map(([name]) => name).join("\n");
      const data = [samples.times, ...lines.map(([, values]) => values)];
      let known = this.drawn[at];
      if (!known || known.names !== names || anew) {
        known?.chart.destroy();
        known?.watch.disconnect();
        known = this.drawn[at] = { names, ...this.#make(plot, lines, data, known?.figure) };
      } else known.chart.setData(data);
    });
  }
  #make(plot, lines, data, figure) {
    if (!figure) {
      figure = document.createElement("figure");
      figure.innerHTML = "<figcaption></figcaption><div></div>";
      figure.firstChild.append(plot.name);
      this.place.append(figure);
    }
    const hold = figure.lastChild;
    const steps = plot.steps ? { paths: uPlot.paths.stepped({ align: 1 }) } : {};
    const series = lines.map(([label], at) => ({
      label, stroke: colorOf(at), width: 2, dash: DASHES[at % DASHES.length],
      points: { show: false }, value: (_, value) => number(value), ...steps }));
    const chart = new uPlot({
      width: Math.max(hold.clientWidth, 240), height: 190, axes: axes(plot.unit), cursor: { sync: { key: "midstream" } },
      scales: { y: { range: (_, low, high) => [Math.min(low ?? 0, 0), high > 0 ? high * 1.08 : 1] } },
      series: [{ label: "time", value: (_, at) => clock(at) }, ...series] }, data, hold);
    const watch = new ResizeObserver(() => hold.clientWidth && chart.setSize({ width: hold.clientWidth, height: 190 }));
    watch.observe(hold);
    return { chart, figure, watch };
  }
}

// Stages in their order, each with the colour of its box.
export const STAGES = [["downloading", 0], ["rebuilding", 6], ["verifying", 4], ["staging", 5], ["staged", 7], ["committing", 1], ["checking", 2]];
const LANE = 34;

export class Timeline {
  constructor(place, tip) { this.place = place; this.tip = tip; this.boxes = []; this.chart = null; this.zoomed = false; }
  draw(swaps, samples, anew = false) {
    const lanes = [...new Set([...samples.replicas, ...swaps.map((swap) => swap.replica)])].sort();
    const times = samples.times;
    const until = swaps.reduce((last, swap) => Math.max(last, swap.stages.at(-1)[1]), times.at(-1) ?? 1);
    const from = Math.min(times[0] ?? until - 60, until - 60);
    this.samples = samples;
    this.swaps = swaps.filter((swap) => endOf(swap, samples) >= from);
    this.range = [from, until];
    if (!this.chart || this.lanes?.join() !== lanes.join() || anew) { this.lanes = lanes; this.#make(); }
    // Two points, so that the axis has what it spans.
    this.chart.setData([[from, until], [0, 0]], false);
    if (!this.zoomed) this.chart.setScale("x", { min: from, max: until });
    else this.chart.redraw();
  }
  #make() {
    this.chart?.destroy();
    this.watch?.disconnect();
    const height = 60 + LANE * Math.max(this.lanes.length, 1);
    const line = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, font: "11px system-ui" };
    this.chart = new uPlot({
      width: Math.max(this.place.clientWidth, 260), height, legend: { show: false },
      cursor: { y: false, points: { show: false }, drag: { x: true, y: false } },
      scales: { x: { time: true }, y: { range: () => [0, Math.max(this.lanes.length, 1)] } },
      axes: [{ ...line }, { ...line, size: 84, splits: () => this.lanes.map((_, at) => this.lanes.length - at - 0.5),
        values: () => this.lanes, grid: { show: false } }],
      series: [{}, { show: false }],
      hooks: { draw: [(chart) => this.#boxes(chart)], setCursor: [(chart) => this.#hover(chart)],
        setSelect: [() => { this.zoomed = true; }] } }, [[...this.range], [0, 0]], this.place);
    this.chart.over.addEventListener("dblclick", () => { this.zoomed = false; });
    this.chart.over.addEventListener("mouseleave", () => { this.tip.hidden = true; });
    this.watch = new ResizeObserver(() => this.place.clientWidth && this.chart.setSize({ width: this.place.clientWidth, height }));
    this.watch.observe(this.place);
  }
  #boxes(chart) {
    const ctx = chart.ctx, ratio = devicePixelRatio;
    this.boxes = [];
    ctx.save();
    ctx.beginPath();
    ctx.rect(chart.bbox.left, chart.bbox.top, chart.bbox.width, chart.bbox.height);
    ctx.clip();
    for (const swap of this.swaps) {
      const lane = this.lanes.indexOf(swap.replica);
      const top = chart.valToPos(this.lanes.length - lane - 0.15, "y", true), bottom = chart.valToPos(this.lanes.length - lane - 0.85, "y", true);
      swap.stages.forEach(([stage, at], index) => {
        const [end, left] = [swap.stages[index + 1]?.[1] ?? endOf(swap, this.samples), chart.valToPos(at, "x", true)];
        const width = Math.max(chart.valToPos(end, "x", true) - left, 2 * ratio);
        const found = STAGES.find(([name]) => name === stage);
        ctx.fillStyle = stage === "error" ? css("--bad") : found ? colorOf(found[1]) : css("--good");
        ctx.fillRect(left, top, width, bottom - top);
        this.boxes.push({ swap, stage, at, end, lane, left: left / ratio, right: (left + width) / ratio });
      });
      const first = chart.valToPos(swap.stages[0][1], "x", true);
      ctx.fillStyle = css("--text");
      ctx.font = `${10 * ratio}px system-ui`;
      ctx.fillText(swap.snapshot.slice(-18), first, bottom + 9 * ratio);
    }
    ctx.restore();
  }
  #hover(chart) {
    const { left, top } = chart.cursor;
    const x = left + chart.bbox.left / devicePixelRatio;
    const lane = this.lanes.length - 1 - Math.floor(chart.posToVal(top, "y"));
    const box = [...this.boxes].reverse().find((one) => one.lane === lane && x >= one.left - 3 && x <= one.right + 3);
    this.tip.hidden = !box;
    if (!box) return;
    const { swap } = box;
    const policy = swap.policy ? ` of policy ${swap.policy}` : "";
    const pause = swap.pause_ms === null ? "" : `\npause ${number(swap.pause_ms)} ms, ${swap.streams_crossed} streams crossed`;
    this.tip.textContent = `${swap.replica}: ${swap.snapshot}${policy}\n${box.stage} from ${clock(box.at)}, ${number(box.end - box.at)} s${pause}${swap.error ? `\n${swap.error}` : ""}`;
    const place = chart.over.getBoundingClientRect();
    this.tip.style.left = `${Math.min(place.left + left + 12, innerWidth - 280)}px`;
    this.tip.style.top = `${place.top + top + 14}px`;
  }
}
