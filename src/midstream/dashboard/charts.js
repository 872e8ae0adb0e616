// Charts over time and over steps, drawn by uPlot. Owns: how numbers, times and stages look.
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
// Of a duration in seconds.
export const ms = (value) => (value === null || value === undefined ? "–" : value < 10 ? `${number(value * 1000)} ms` : `${number(value)} s`);
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
  // Of two counters of all replicas: how much the first grew for each one that the second grew by.
  ratio(over, under) {
    return this.all.map((one, at) => {
      let [more, each] = [0, 0];
      for (const [replica, now] of Object.entries(one[1])) {
        const then = this.all[at - 1]?.[1][replica];
        if (!then || then[7] !== now[7] || now[under] < then[under]) continue;
        more += now[over] - then[over];
        each += now[under] - then[under];
      }
      return each > 0 ? more / each : null;
    });
  }
  // Whether any replica's counter is above zero.
  any(index) { return Object.values(this.all.at(-1)?.[1] ?? {}).some((one) => one[index] > 0); }
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

// What a chart without a line says. Counters of replicas outlive the samples.
const idle = (s) => (s.any(1) ? "no traffic in these 15 minutes" : "no traffic yet");
const scaled = (values, by) => values.map((value) => (value === null ? null : value * by));
// sparse: a value now and then, so that its points are shown and joined. steps: held until the next value. idle: what the chart
// says while all its values are zero; left out where zero says something.
const PLOTS = [
  { name: "Time to the first token", unit: "ms", sparse: true, idle, lines: (s) => [["mean of the turns", scaled(s.ratio(9, 8), 1000)]] },
  { name: "Cache hits", unit: "% of prompt tokens", sparse: true, idle, lines: (s) => [["from the cache", scaled(s.ratio(2, 1), 100)]] },
  { name: "Staleness", unit: "signals behind the newest", lines: (s) => s.replicas.map((r) => [r, s.gauge(r, 6)]), steps: true },
  { name: "Reward per step", unit: "mean reward", sparse: true, idle: () => "no rewards yet", overSteps: true, lines: rewardLines },
  { name: "Tokens a second", unit: "tokens/s", idle, lines: (s) => [
    ["generated", s.total(s.replicas.map((r) => s.rate(r, 0)))], ["prompt", s.total(s.replicas.map((r) => s.rate(r, 1)))],
    ["prompt, cached", s.total(s.replicas.map((r) => s.rate(r, 2)))]] },
  { name: "Sequences", unit: "sequences", idle, lines: (s) => [
    ["running", s.total(s.replicas.map((r) => s.gauge(r, 3)))], ["waiting", s.total(s.replicas.map((r) => s.gauge(r, 4)))]] },
  { name: "KV cache in use", unit: "% of blocks", idle, lines: (s) => s.replicas.map((r) => [r, scaled(s.gauge(r, 5), 100)]) },
  { name: "Requests a second", unit: "requests/s", idle, lines: (s) => [["answered", s.counted(2)], ["failed", s.counted(3)], ["cut short", s.counted(4)]] },
  { name: "Sessions", unit: "sessions", idle, lines: (s) => [["known", s.all.map((one) => one[5])]], steps: true },
];

// A step is a snapshot, in the order in which they were first rewarded.
const stepsOf = (rewards) => [...new Set(rewards.map((one) => one.snapshot))];

function rewardLines(_, rewards) {
  const steps = stepsOf(rewards), lines = new Map();
  for (const one of rewards) {
    const label = one.policy ? `${one.policy}: ${one.name}` : one.name;
    if (!lines.has(label)) lines.set(label, steps.map(() => null));
    lines.get(label)[steps.indexOf(one.snapshot)] = one.mean;
  }
  return lines.size ? [...lines] : [["reward", []]];
}

function axes(unit, overSteps) {
  const line = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line") }, font: "11px system-ui" };
  const whole = overSteps ? { values: (_, values) => values.map((value) => Number.isInteger(value) ? value : ""), label: "step", labelSize: 16, labelFont: "11px system-ui" } : {};
  return [{ ...line, ...whole }, { ...line, size: 56, values: (_, values) => values.map((v) => number(v)), label: unit, labelSize: 16, labelFont: "11px system-ui" }];
}

export class Charts {
  constructor(place) { this.place = place; this.drawn = []; }
  // rewards: in the order in which their snapshots were first rewarded.
  draw(samples, rewards, anew = false) {
    this.steps = stepsOf(rewards);
    PLOTS.forEach((plot, at) => {
      const lines = plot.lines(samples, rewards);
      const names = lines.map(([name]) => name).join("\n");
      const data = [plot.overSteps ? this.steps.map((_, step) => step + 1) : samples.times, ...lines.map(([, values]) => values)];
      let known = this.drawn[at];
      if (!known || known.names !== names || anew) {
        known?.chart.destroy();
        known?.watch.disconnect();
        known = this.drawn[at] = { names, ...this.#make(plot, lines, data, known?.figure) };
      } else known.chart.setData(data);
      const silent = plot.idle && lines.every(([, values]) => values.every((value) => plot.overSteps ? value === null : !value));
      known.figure.querySelector(".idle").textContent = silent ? plot.idle(samples) : "";
    });
  }
  #make(plot, lines, data, figure) {
    if (!figure) {
      figure = document.createElement("figure");
      figure.innerHTML = "<figcaption></figcaption><div></div><p class='idle'></p>";
      figure.firstChild.append(plot.name);
      this.place.append(figure);
    }
    const hold = figure.querySelector("div");
    const steps = plot.steps ? { paths: uPlot.paths.stepped({ align: 1 }) } : {};
    const series = lines.map(([label], at) => ({
      label, stroke: colorOf(at), width: 2, dash: DASHES[at % DASHES.length], spanGaps: Boolean(plot.sparse),
      points: { show: Boolean(plot.sparse), size: 5 }, value: (_, value) => number(value), ...steps }));
    const first = plot.overSteps ? { label: "step", value: (_, step) => (step ? `${step}: ${this.steps[step - 1]}` : "–") } : { label: "time", value: (_, at) => clock(at) };
    const y = { range: (_, low, high) => [Math.min(low ?? 0, 0), high > 0 ? high * 1.08 : low < 0 ? 0 : 1] };
    const chart = new uPlot({
      width: Math.max(hold.clientWidth, 240), height: 190, axes: axes(plot.unit, plot.overSteps), cursor: plot.overSteps ? {} : { sync: { key: "midstream" } },
      scales: { x: { time: !plot.overSteps }, y }, series: [first, ...series] }, data, hold);
    const watch = new ResizeObserver(() => hold.clientWidth && chart.setSize({ width: hold.clientWidth, height: 190 }));
    watch.observe(hold);
    return { chart, figure, watch };
  }
}

// Stages in their order, each with the colour of its box.
export const STAGES = [["downloading", 0], ["rebuilding", 6], ["verifying", 4], ["staging", 5], ["staged", 7], ["committing", 1], ["checking", 2]];
