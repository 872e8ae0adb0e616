// The dashboard. Owns: the connection to the server, what is known of it, and every table.
// Always holds: text from the server becomes text on the page, never markup. What the event stream does not tell is read from the
// API when it is looked at, and not more often than every 5 seconds.

import { Charts, Samples, STAGES, Timeline, bytes, clock, endOf, number, share } from "./charts.js";
import { Trace } from "./trace.js";

const $ = (id) => document.getElementById(id);
const READ_AGAIN_MS = 5000;
const SWAPS_LISTED = 40;
const SWAPS_KEPT = 512;
const known = { server: null, replicas: [], policies: [], counts: null, swaps: new Map(), samples: new Samples(), deployment: "" };
let key = sessionStorage.getItem("midstream-key") ?? "";

// -- the server

class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

async function ask(path, options = {}) {
  const headers = { ...(key ? { authorization: `Bearer ${key}` } : {}), ...options.headers };
  if (known.deployment) headers["fireworks-deployment"] = known.deployment;
  const answer = await fetch(path, { ...options, headers });
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => null);
  throw new Refused(answer.status, said?.error?.message ?? `HTTP ${answer.status}`);
}
const read = async (path, options) => (await ask(path, options)).json();

async function listen() {
  let wait = 500;
  for (;;) {
    try {
      const answer = await ask("/dashboard/events");
      fresh();
      wait = 500;
      state("live", "good");
      await events(answer.body);
      state("the stream ended", "bad");
    } catch (error) {
      if (error instanceof Refused && [401, 403].includes(error.status)) await wantKey(error.message);
      else state(error instanceof Refused ? error.message : "no answer", "bad");
    }
    // Many pages lose one gateway at the same moment.
    await new Promise((go) => setTimeout(go, wait * (0.5 + Math.random())));
    wait = Math.min(wait * 2, 30000);
  }
}

async function events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const whole = text.split("\n\n");
    text = whole.pop();
    for (const event of whole) {
      const name = event.match(/^event: (.*)$/m)?.[1];
      if (name) take(name, JSON.parse(event.match(/^data: ([^\n]*)/m)[1]));
    }
    soon();
  }
}

function fresh() {
  known.swaps.clear();
  known.samples.clear();
}

function take(name, data) {
  if (name === "samples") known.samples.add(data);
  else if (name === "swaps") data.forEach(keepSwap);
  else known[name] = data;
}

// The newest are the last ones, and a page that stays open keeps no more of them than the server does.
function keepSwap(swap) {
  // A policy may be made anew, and a fallback has the generation of what failed.
  const id = [swap.replica, swap.boot, swap.policy, swap.generation, swap.snapshot, swap.stages[0][1]].join();
  known.swaps.delete(id);
  known.swaps.set(id, swap);
  if (known.swaps.size > SWAPS_KEPT) known.swaps.delete(known.swaps.keys().next().value);
}

function state(text, how) {
  $("state").textContent = text;
  $("state").className = how;
}

function wantKey(why) {
  state("a key is needed", "bad");
  $("key-why").textContent = why;
  $("key").value = "";
  $("key-dialog").showModal();
  return new Promise((go) => $("key-dialog").addEventListener("close", () => {
    key = $("key").value.trim();
    sessionStorage.setItem("midstream-key", key);
    go();
  }, { once: true }));
}

// -- tables

function cell(content, kind = "td") {
  const made = document.createElement(kind);
  if (content instanceof Node) made.append(content);
  else if (content && typeof content === "object") {
    made.textContent = content.text;
    made.className = content.as ?? "";
  } else made.textContent = content ?? "–";
  return made;
}
const num = (text) => ({ text, as: "number" });
const long = (text) => ({ text, as: "long" });
const mood = (text, good) => ({ text, as: good ? "good" : "bad" });

// rows: {key, cells, open}: `open` is what a click or Enter does.
function table(place, heads, rows, empty) {
  // What somebody selects, to copy it, stays until it is let go.
  const selected = getSelection();
  if (!selected.isCollapsed && place.contains(selected.anchorNode)) return;
  const focused = place.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  const made = document.createElement("table");
  const head = made.createTHead().insertRow();
  heads.forEach((name) => head.append(cell(name, "th")));
  const body = made.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    line.dataset.key = row.key;
    row.cells.forEach((content) => line.append(cell(content)));
    if (row.open) {
      line.className = "link";
      line.tabIndex = 0;
      line.addEventListener("click", row.open);
      line.addEventListener("keydown", (event) => event.key === "Enter" && row.open());
    }
  }
  if (!rows.length) {
    const only = cell(empty);
    only.colSpan = heads.length;
    body.insertRow().append(only);
  }
  place.replaceChildren(made);
  // A head stands over its numbers.
  if (rows.length) [...body.rows[0].cells].forEach((one, at) => { if (one.className === "number") head.cells[at].className = "number"; });
  if (focused) [...body.rows].find((line) => line.dataset.key === focused)?.focus();
}

function kv(replica) {
  if (!replica.kv_total) return "–";
  const part = replica.kv_used / replica.kv_total;
  const both = document.createElement("span");
  const meter = document.createElement("meter");
  Object.assign(meter, { max: 1, high: 0.9, value: part });
  meter.setAttribute("aria-label", "KV cache in use");
  both.append(meter, ` ${share(part)}`);
  return both;
}

function drawReplicas() {
  const { deployments, version, gateways, gateways_ready: ready } = known.server;
  const usable = deployments.reduce((sum, one) => sum + one.usable, 0), wanted = deployments.reduce((sum, one) => sum + one.wanted, 0);
  const of = deployments.map((one) => `${short(one.name)}: ${one.desired}${one.generation ? ` (signal ${one.generation})` : ""}, ${one.sessions} sessions, ${one.policies} policies`);
  $("summary").textContent = `Version ${version}. ${usable} of ${wanted} replicas usable, ${ready} of ${gateways} gateways ready. ${of.join("; ")}.`;
  const heads = ["replica", "deployment", "stage", "snapshot", "behind", "in flight", "running", "waiting", "KV", "policies", "error"];
  table($("replica-table"), heads, known.replicas.map((one) => ({
    key: one.name, cells: [one.name, short(one.deployment),
      mood(one.usable ? one.stage : one.standing === "member" ? `${one.stage}, not usable` : one.standing, one.usable),
      one.target && one.target !== one.snapshot ? `${one.snapshot} → ${one.target}` : one.snapshot, num(number(one.behind)), num(one.in_flight),
      num(number(one.running)), num(number(one.waiting)), kv(one), num(number(one.policies)), one.error ? { text: one.error, as: "long bad" } : ""] })),
  "No replica is known.");
}

const short = (name) => name.split("/").at(-1);

function drawSwaps(anew) {
  const swaps = [...known.swaps.values()].sort((a, b) => a.stages[0][1] - b.stages[0][1]);
  timeline.draw(swaps, known.samples, anew);
  const heads = ["replica", "snapshot", "policy", "begun", "took s", "stage", "pause ms", "streams crossed", "error"];
  table($("swap-table"), heads, swaps.slice(-SWAPS_LISTED).reverse().map((one) => {
    const [stage] = one.stages.at(-1), until = endOf(one, known.samples);
    return { key: [one.replica, one.boot, one.policy, one.generation].join(), cells: [one.replica, one.snapshot, one.policy, clock(one.stages[0][1]),
      num(number(until - one.stages[0][1])), mood(stage === "idle" ? "ready" : stage, stage !== "error"),
      num(number(one.pause_ms)), num(one.streams_crossed ?? "–"), one.error ? long(one.error) : ""] };
  }), "No replica has loaded a snapshot yet.");
}

function drawPolicies() {
  table($("policy-table"), ["policy", "deployment", "in flight", "snapshots", "bytes", "error"], known.policies.map((one) => {
    const served = new Map();
    for (const [snapshot] of Object.values(one.replicas)) served.set(snapshot, (served.get(snapshot) ?? 0) + 1);
    const where = [...served].map(([snapshot, count]) => `${snapshot} on ${count}`).join(", ");
    return { key: one.policy, cells: [one.policy, short(one.deployment), num(one.in_flight), long(where), num(bytes(policyBytes.get(one.policy))), one.error ? long(one.error) : ""] };
  }), "No replica holds a policy.");
}

function drawErrors() {
  const rows = [];
  for (const one of known.server.deployments) for (const [replica, why] of Object.entries(one.failed)) rows.push(["now", replica, "", why]);
  for (const one of known.replicas) if (one.error && !rows.some((row) => row[1] === one.name)) rows.push(["now", one.name, one.snapshot, one.error]);
  for (const one of ledger?.disagreements ?? []) rows.push(["", one.replica, one.identity, `${one.verdict}: ${one.error ?? ""}`]);
  for (const one of [...known.swaps.values()].filter((swap) => swap.error).reverse()) rows.push([clock(one.stages.at(-1)[1]), one.replica, one.snapshot, one.error]);
  table($("error-table"), ["when", "replica", "snapshot", "what"], rows.map((row, at) => ({ key: String(at), cells: [row[0], row[1], row[2], long(row[3])] })), "Nothing has failed.");
  if (!known.counts) return;
  const { requests, ...others } = known.counts;
  const counted = requests.filter(([, status]) => status >= 400).map(([path, status, count]) => [`${path}: status ${status}${status === 499 ? " (the client left)" : ""}`, count]);
  for (const name of ["upstream_errors", "cut_responses", "retries"]) for (const [of, count] of Object.entries(others[name] ?? {})) counted.push([`${name.replace("_", " ")}: ${of}`, count]);
  table($("count-table"), ["counted since the server began", "times"], counted.map(([what, count]) => ({ key: what, cells: [what, num(count)] })), "No request has failed.");
}

// -- what is read from the API when it is looked at

let ledger = null;
const policyBytes = new Map();

async function drawSnapshots() {
  const name = known.deployment || known.server.deployments[0]?.name;
  if (!name) return;
  ledger = await read(`/v1/${name}/ledger?limit=1000`);
  table($("snapshot-table"), ["snapshot", "kind", "bytes", "stands on", "signalled", "ready after s", "replicas", "cache"], [...ledger.snapshots].reverse().map((one) => ({
    key: one.identity, cells: [one.identity === ledger.desired_snapshot_identity ? `${one.identity} (desired)` : one.identity, one.kind,
      num(bytes(one.files?.reduce((sum, file) => sum + file.size, 0))), one.previous_snapshot_identity ?? "", clock(one.signalled_at),
      num(one.ready_at ? number(one.ready_at - one.first_signalled_at) : "–"),
      long(one.replicas.map((each) => `${each.replica}: ${each.error ?? (each.stage === "idle" ? "ready" : each.stage)}`).join(", ")), one.reset_prompt_cache] })),
  "Nothing was signalled yet: replicas serve the weights they started with.");
  drawErrors();
}

async function drawPolicyBytes() {
  if (!known.policies.length) return;
  for (const name of new Set(known.policies.map((one) => one.deployment))) {
    for (let page = ""; page !== null; ) {
      const told = await read(`/v1/${name}/policies?pageToken=${encodeURIComponent(page)}`);
      for (const one of told.policies) policyBytes.set(one.policy, one.bytes);
      page = told.nextPageToken || null;
    }
  }
  drawPolicies();
}

async function drawSessions() {
  const query = $("session-query").value.trim();
  const found = new Map();
  if (query) {
    const exact = await read(`/v1/sessions/${encodeURIComponent(query)}`).catch((error) => {
      if (error.status !== 404) throw error;
    });
    if (exact) found.set(exact.id, exact);
  }
  const listed = await read(`/v1/sessions?limit=100${query ? `&after=${encodeURIComponent(query)}` : ""}`);
  for (const one of listed.data) if (one.id.startsWith(query)) found.set(one.id, one);
  const rows = [...found.values()].sort((a, b) => (query ? 0 : b.used_at - a.used_at));
  table($("session-table"), ["session", "replica", "turns", "open", "prompt tokens", "cached", "generated", "first token s", "token every s", "last used"], rows.map((one) => ({
    key: one.id, open: () => openTrace(one.id), cells: [one.id, one.replica, num(one.turns), num(one.open_turns), num(number(one.prompt_tokens)), num(share(one.cached_share)),
      num(number(one.generated_tokens)), num(number(one.mean_time_to_first_token_s)), num(number(one.mean_inter_token_s)), clock(one.used_at)] })),
  query ? "No session's key begins so." : "No session of this key's tenant is known.");
  $("session-note").textContent = listed.has_more ? "The first 100 keys in order, of more: search for others." : "";
}

async function openTrace(id) {
  $("trace-note").textContent = `Reading ${id}.`;
  try {
    await trace.show(id, await read(`/v1/sessions/${encodeURIComponent(id)}/trace`));
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    $("trace-note").textContent = error.status === 404 ? `${id} has no trace: its requests kept none. Turns of chats are kept.` : error.message;
  }
  $("trajectory").scrollIntoView();
}

async function texts(model, tokens) {
  if (!tokens.length) return [];
  try {
    const told = await read("/detokenize", { method: "POST", headers: { "content-type": "application/json" },
      body: JSON.stringify({ model, tokens, return_token_texts: true }) });
    return told.token_texts;
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    return tokens.map((id) => `‹${id}›`);
  }
}

// A reader runs while its section is on the screen, when what it shows may have changed.
class Reader {
  constructor(section, act, mark) {
    Object.assign(this, { act, mark, seen: false, busy: false, at: 0, last: undefined });
    new IntersectionObserver(([entry]) => { this.seen = entry.isIntersecting; this.look(); }).observe($(section));
    this.place = $(section).querySelector(".wide");
  }
  async look(now = false) {
    const mark = known.server && this.mark();
    if (!known.server || document.hidden || this.busy) return;
    if (!now && (!this.seen || mark === this.last || Date.now() - this.at < READ_AGAIN_MS)) return;
    Object.assign(this, { busy: true, at: Date.now(), last: mark });
    try {
      await this.act();
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      this.place.textContent = error.message;
      this.last = undefined;
    } finally {
      this.busy = false;
    }
  }
}

// -- the page

const tip = $("tip");
const charts = new Charts(document.querySelector(".charts"));
const timeline = new Timeline($("timeline"), tip);
const trace = new Trace($("trace"), $("trace-legend"), $("trace-note"), tip, texts);
const generations = () => JSON.stringify([known.server.deployments.map((one) => one.generation), [...known.swaps.values()].reduce((most, one) => Math.max(most, one.number), 0)]);
const readers = [
  new Reader("snapshots", drawSnapshots, generations),
  new Reader("policies", drawPolicyBytes, generations),
  // Turns end all the time.
  new Reader("sessions", drawSessions, () => Date.now()),
];

let planned = 0;
function soon() {
  planned ||= requestAnimationFrame(() => { planned = 0; draw(); });
}

function draw(anew = false) {
  if (!known.server) return;
  drawDeployments();
  drawReplicas();
  drawPolicies();
  drawErrors();
  if (known.samples.all.length) {
    charts.draw(known.samples, anew);
    drawSwaps(anew);
  }
  readers.forEach((reader) => reader.look());
}

function drawDeployments() {
  const names = known.server.deployments.map((one) => one.name);
  $("deployment-of").hidden = names.length < 2;
  if ([...$("deployment").options].map((one) => one.value).join() !== names.join()) {
    $("deployment").replaceChildren(...names.map((name) => new Option(short(name), name)));
    if (!names.includes(known.deployment)) known.deployment = names.length > 1 ? names[0] : "";
    $("deployment").value = known.deployment;
  }
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  localStorage.setItem("midstream-theme", name);
  draw(true);
}
const sections = [...document.querySelectorAll("main section")];
const KEYS = {
  ...Object.fromEntries(sections.map((section, at) => [String(at + 1), [section.querySelector("h2").textContent, () => { section.scrollIntoView(); section.querySelector("[tabindex='0']")?.focus(); }]])),
  "/": ["Search a session", () => { $("sessions").scrollIntoView(); $("session-query").focus(); }],
  t: ["Light or dark", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark")],
  "?": ["These keys", () => $("help-dialog").showModal()],
};

document.addEventListener("keydown", (event) => {
  if (event.target.matches("input, select") || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const found = KEYS[event.key];
  if (!found) return;
  event.preventDefault();
  found[1]();
});
for (const [name, [what]] of Object.entries(KEYS)) {
  const [term, text] = [document.createElement("dt"), document.createElement("dd")];
  term.textContent = name;
  text.textContent = what;
  $("keys").append(term, text);
}
for (const section of sections) {
  const link = document.createElement("a");
  Object.assign(link, { href: `#${section.id}`, textContent: section.querySelector("h2").textContent });
  document.querySelector("nav").append(link);
}
for (const [stage, color] of STAGES) {
  const item = document.createElement("li");
  item.textContent = stage;
  item.style.setProperty("--mark", `var(--c${color})`);
  $("stage-legend").append(item);
}
$("theme").addEventListener("click", KEYS.t[1]);
$("help").addEventListener("click", KEYS["?"][1]);
$("deployment").addEventListener("change", () => { known.deployment = $("deployment").value; readers.forEach((reader) => reader.look(true)); });
$("session-search").addEventListener("submit", (event) => { event.preventDefault(); readers[2].look(true); });
document.addEventListener("visibilitychange", soon);
theme(localStorage.getItem("midstream-theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
listen();
