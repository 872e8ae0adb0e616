// The lanes of swaps, drawn by uPlot. Owns: their boxes, the names at them, and what is told of the one under the pointer.
// Always holds: no name covers another one. Where there is no room for all, the newest are shown; the pointer tells each.

import { STAGES, clock, colorOf, css, endOf, ms, number } from "./charts.js";

const LANE = 34;
const NAME_GAP = 8;
const LABEL_LETTERS = 18;
const runOf = (snapshot) => snapshot.slice(0, snapshot.lastIndexOf("/") + 1);

// How snapshots are called at the lanes: of a training run's RUN/12 its number, and the end of RUN where several runs are shown.
export function runLabels(snapshots) {
  const runs = [...new Set(snapshots.map(runOf))].filter(Boolean);
  const label = (snapshot) => {
    const run = runOf(snapshot), rest = snapshot.slice(run.length);
    const whole = run && runs.length > 1 ? `${run.slice(-5)}${rest}` : rest;
    return whole.length > LABEL_LETTERS ? `…${whole.slice(1 - LABEL_LETTERS)}` : whole;
  };
  const example = snapshots.findLast(runOf);
  return { label, note: example ? `${label(example)} is short for ${example}.` : "" };
}

export class Timeline {
  constructor(place, tip) {
    Object.assign(this, { place, tip, boxes: [], chart: null, zoomed: false });
    this.measure = document.createElement("canvas").getContext("2d");
    this.names = document.createElement("div");
    this.names.className = "lane-names";
  }
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
      axes: [{ ...line }, { ...line, size: () => Math.max(60, ...this.#asShown().map((lane) => this.measure.measureText(lane).width + 18)), splits: () => this.lanes.map((_, at) => this.lanes.length - at - 0.5),
        values: () => this.#asShown(), grid: { show: false } }],
      series: [{}, { show: false }],
      hooks: { draw: [(chart) => this.#boxes(chart)], setCursor: [(chart) => this.#hover(chart)],
        setSelect: [() => { this.zoomed = true; }] } }, [[...this.range], [0, 0]], this.place);
    this.chart.over.append(this.names);
    this.chart.over.addEventListener("dblclick", () => { this.zoomed = false; });
    this.chart.over.addEventListener("mouseleave", () => { this.tip.hidden = true; });
    this.watch = new ResizeObserver(() => this.place.clientWidth && this.chart.setSize({ width: this.place.clientWidth, height }));
    this.watch.observe(this.place);
  }
  // Names of replicas have what they need, up to a third of the place.
  #asShown() {
    this.measure.font = "11px system-ui";
    const room = Math.max(this.place.clientWidth, 260) / 3 - 18;
    return this.lanes.map((lane) => this.#fitting(lane, room));
  }
  #fitting(lane, room) {
    let [kept, shown] = [lane.length, lane];
    while (kept > 4 && this.measure.measureText(shown).width > room) {
      kept -= 1;
      shown = `${lane.slice(0, Math.floor(kept / 3))}…${lane.slice(Math.floor(kept / 3) - kept)}`;
    }
    return shown;
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
      const top = chart.valToPos(this.lanes.length - lane - 0.06, "y", true), bottom = chart.valToPos(this.lanes.length - lane - 0.6, "y", true);
      swap.stages.forEach(([stage, at], index) => {
        const [end, left] = [swap.stages[index + 1]?.[1] ?? endOf(swap, this.samples), chart.valToPos(at, "x", true)];
        const width = Math.max(chart.valToPos(end, "x", true) - left, 2 * ratio);
        const found = STAGES.find(([name]) => name === stage);
        ctx.fillStyle = stage === "error" ? css("--bad") : found ? colorOf(found[1]) : css("--good");
        ctx.fillRect(left, top, width, bottom - top);
        this.boxes.push({ swap, stage, at, end, lane, left: left / ratio, right: (left + width) / ratio });
      });
    }
    ctx.restore();
    this.#names(chart);
  }
  #names(chart) {
    const { label } = runLabels(this.swaps.map((swap) => swap.snapshot));
    const width = chart.over.clientWidth, made = [], free = new Map();
    this.measure.font = "10px system-ui";
    for (const swap of this.swaps.toSorted((one, other) => other.stages[0][1] - one.stages[0][1])) {
      const text = label(swap.snapshot), size = this.measure.measureText(text).width + NAME_GAP;
      const lane = this.lanes.indexOf(swap.replica), end = free.get(lane) ?? width;
      // The newest one of a lane is shown, if need be to the left of its box.
      const left = free.has(lane) ? chart.valToPos(swap.stages[0][1], "x") : Math.min(chart.valToPos(swap.stages[0][1], "x"), width - size);
      if (left < 0 || left + size > end) continue;
      const shown = document.createElement("span");
      shown.className = "lane-name";
      shown.textContent = text;
      shown.style.left = `${left}px`;
      shown.style.top = `${chart.valToPos(this.lanes.length - lane - 0.64, "y")}px`;
      made.push(shown);
      free.set(lane, left);
    }
    this.names.replaceChildren(...made);
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
    this.tip.textContent = `${swap.replica}: ${swap.snapshot}${policy}\n${box.stage} from ${clock(box.at)}, ${ms(box.end - box.at)}${pause}${swap.error ? `\n${swap.error}` : ""}`;
    const place = chart.over.getBoundingClientRect();
    this.tip.style.left = `${Math.min(place.left + left + 12, innerWidth - 280)}px`;
    this.tip.style.top = `${place.top + top + 14}px`;
  }
}
