// Draws the charts of the demo's report with uPlot, anew when the system turns light or dark.
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const short = (value) => value === null || value === undefined ? "–"
  : value !== 0 && Math.abs(value) < 0.001 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
const place = document.querySelector(".plots");

function draw() {
  place.replaceChildren();
  const charts = JSON.parse(document.getElementById("charts").textContent);
  // All of them first: how wide one is depends on how many there are.
  const figures = charts.map((chart) => {
    const figure = document.createElement("figure"), caption = document.createElement("figcaption");
    caption.textContent = chart.title;
    figure.append(caption);
    place.append(figure);
    return figure;
  });
  charts.forEach((chart, number) => {
    const figure = figures[number];
    const steps = Math.max(...chart.lines.map((line) => line.values.length));
    const data = [Array.from({ length: steps }, (_, at) => at + 1)];
    const series = [{ label: "step" }], bands = [];
    chart.lines.forEach((line, at) => {
      const stroke = css(`--c${at}`);
      data.push(line.values);
      series.push({ label: line.name, stroke, width: 2, dash: at ? [8, 4] : [], points: { show: true, size: 5 }, spanGaps: true,
        value: (_, value) => short(value) });
      if (line.low.length) {
        bands.push({ series: [data.length, data.length + 1], fill: `${stroke}33` });
        for (const edge of [line.high, line.low]) {
          data.push(edge);
          series.push({ label: "", stroke: "transparent", points: { show: false }, class: "edge" });
        }
      }
    });
    const line = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line") }, font: "11px system-ui",
      labelFont: "11px system-ui", labelSize: 16 };
    const whole = (_, values) => values.map((value) => Number.isInteger(value) ? value : "");
    new uPlot({
      width: Math.max(figure.clientWidth - 20, 240), height: 220, bands, series,
      scales: { x: { time: false }, y: chart.log ? { distr: 3 } : { range: (_, low, high) => [Math.min(low ?? 0, 0), high > 0 ? high * 1.05 : 1] } },
      axes: [{ ...line, label: "step", values: whole }, { ...line, label: chart.unit, size: 60, values: (_, values) => values.map(short) }],
    }, data, figure);
    for (const edge of figure.querySelectorAll(".u-legend .edge")) edge.remove();
  });
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
