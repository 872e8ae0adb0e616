// The dashboard. Owns: the connection to the server, what is known of it, and every table.
// Always holds: text from the server becomes text on the page, never markup. What the event stream does not tell is read from the
// API when it is looked at, and not more often than every 5 seconds.

import { Charts, Samples, STAGES, bytes, clock, endOf, ms, number, share } from "./charts.js";
import { Timeline, runLabels } from "./lanes.js";
import { Table, long, mood, named, num, steady } from "./tables.js";
import { Trace } from "./trace.js";

const $ = (id) => document.getElementById(id);
const READ_AGAIN_MS = 5000;
const SWAPS_KEPT = 512;
const known = { server: null, replicas: [], policies: [], rewards: [], counts: null, swaps: new Map(), samples: new Samples(), deployment: "" };
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

// A policy may be made anew, and a fallback has the generation of what failed.
const idOf = (swap) => [swap.replica, swap.boot, swap.policy, swap.generation, swap.snapshot, swap.stages[0][1]].join();

// The newest are the last ones, and a page that stays open keeps no more of them than the server does.
function keepSwap(swap) {
  const id = idOf(swap);
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

const tables = {
  errors: new Table($("error-table"), ["when", "replica", "snapshot", "what"], "Nothing has failed."),
  counts: new Table($("count-table"), ["counted since the server began", "times"], "No request has failed."),
  sessions: new Table($("session-table"), ["session", "replica", "turns", "open", "prompt tokens", "cached", "generated", "first token", "token every", "reward", "last used"],
    "No session of this key's tenant is known.", { search: false }),
  replicas: new Table($("replica-table"), ["replica", "deployment", "stage", "snapshot", "behind", "in flight", "running", "waiting", "KV", "policies"], "No replica is known."),
  swaps: new Table($("swap-table"), ["replica", "snapshot", "policy", "begun", "took", "stage", "pause ms", "streams crossed", "error"], "No replica has loaded a snapshot yet."),
  snapshots: new Table($("snapshot-table"), ["snapshot", "kind", "bytes", "stands on", "signalled", "ready after", "replicas", "cache"],
    "Nothing was signalled yet: replicas serve the weights they started with."),
  policies: new Table($("policy-table"), ["policy", "deployment", "in flight", "snapshots", "bytes", "error"], "No replica holds a policy."),
};

// Of running requests, and of sessions between two turns; and how many sessions wait for room.
const kv = (replica) => replica.kv_total ? {
  text: `${share(replica.kv_used / replica.kv_total)} + ${share(replica.kv_held / replica.kv_total)}${replica.sessions_waiting ? `, ${replica.sessions_waiting} wait` : ""}`,
  meter: (replica.kv_used + replica.kv_held) / replica.kv_total } : "–";

function drawReplicas() {
  const { deployments, version, gateways, gateways_ready: ready } = known.server;
  const usable = deployments.reduce((sum, one) => sum + one.usable, 0), wanted = deployments.reduce((sum, one) => sum + one.wanted, 0);
  const of = deployments.map((one) => `${short(one.name)}: ${one.desired}${one.generation ? ` (signal ${one.generation})` : ""}, ${one.sessions} sessions, ${one.policies} policies`);
  $("summary").textContent = `Version ${version}. ${usable} of ${wanted} replicas usable, ${ready} of ${gateways} gateways ready. ${of.join("; ")}.`;
  tables.replicas.draw(known.replicas.map((one) => ({
    key: `${one.deployment} ${one.name}`, cells: [named(one.name), named(short(one.deployment)),
      mood(`${one.usable ? one.stage : one.standing === "member" ? `${one.stage}, not usable` : one.standing}${one.error ? ", see errors" : ""}`, one.usable && !one.error),
      named(one.target && one.target !== one.snapshot ? `${one.snapshot} → ${one.target}` : one.snapshot), num(number(one.behind)), num(one.in_flight),
      num(number(one.running)), num(number(one.waiting)), kv(one), num(number(one.policies))] })));
}

const short = (name) => name.split("/").at(-1);

function drawSwaps(anew) {
  const swaps = [...known.swaps.values()].sort((a, b) => a.stages[0][1] - b.stages[0][1]);
  timeline.draw(swaps, known.samples, anew);
  const label = runLabels(swaps.map((one) => one.snapshot));
  $("swap-names").textContent = label.note;
  tables.swaps.draw(swaps.toReversed().map((one) => {
    const [stage] = one.stages.at(-1), until = endOf(one, known.samples);
    return { key: idOf(one), cells: [named(one.replica), named(one.snapshot), named(one.policy), clock(one.stages[0][1]),
      num(ms(until - one.stages[0][1])), mood(stage === "idle" ? "ready" : stage, stage !== "error"),
      num(number(one.pause_ms)), num(one.streams_crossed ?? "–"), one.error ? long(one.error) : ""] };
  }));
}

function drawPolicies() {
  tables.policies.draw(known.policies.map((one) => {
    const served = new Map();
    for (const [snapshot] of Object.values(one.replicas)) served.set(snapshot, (served.get(snapshot) ?? 0) + 1);
    const where = [...served].map(([snapshot, count]) => `${snapshot} on ${count}`).join(", ");
    return { key: `${one.deployment} ${one.policy}`, cells: [named(one.policy), named(short(one.deployment)), num(one.in_flight), long(where), num(bytes(policyBytes.get(one.policy))), one.error ? long(one.error) : ""] };
  }));
}

function drawErrors() {
  const rows = [];
  for (const one of known.server.deployments) for (const [replica, why] of Object.entries(one.failed)) rows.push(["now", replica, "", why]);
  for (const one of known.replicas) if (one.error && !rows.some((row) => row[1] === one.name)) rows.push(["now", one.name, one.snapshot, one.error]);
  for (const one of known.replicas) if (one.audit) rows.push(["", one.name, one.snapshot, one.audit]);
  for (const one of ledger?.disagreements ?? []) rows.push(["", one.replica, one.identity, `${one.verdict}: ${one.error ?? ""}`]);
  for (const one of [...known.swaps.values()].filter((swap) => swap.error).reverse()) rows.push([clock(one.stages.at(-1)[1]), one.replica, one.snapshot, one.error]);
  tables.errors.draw(rows.map((row, at) => ({ key: `${rows.length - at} ${row.join()}`, cells: [row[0], named(row[1]), named(row[2]), long(row[3])] })));
  if (!known.counts) return;
  const { requests, ...others } = known.counts;
  const counted = requests.filter(([, status]) => status >= 400).map(([path, status, count]) => [`${path}: status ${status}${status === 499 ? " (the client left)" : ""}`, count]);
  for (const name of ["upstream_errors", "cut_responses", "retries"]) for (const [of, count] of Object.entries(others[name] ?? {})) counted.push([`${name.replace("_", " ")}: ${of}`, count]);
  counted.sort((one, other) => other[1] - one[1]);
  tables.counts.draw(counted.map(([what, count]) => ({ key: what, cells: [what, num(count)] })));
}

// -- what is read from the API when it is looked at

let ledger = null;
const policyBytes = new Map();

async function drawSnapshots() {
  const name = known.deployment || known.server.deployments[0]?.name;
  if (!name) return;
  ledger = await read(`/v1/${name}/ledger?limit=1000`);
  tables.snapshots.draw([...ledger.snapshots].reverse().map((one) => ({
    key: one.identity, cells: [named(one.identity === ledger.desired_snapshot_identity ? `${one.identity} (desired)` : one.identity), one.kind,
      num(bytes(one.files?.reduce((sum, file) => sum + file.size, 0))), named(one.previous_snapshot_identity ?? ""), clock(one.signalled_at),
      num(one.ready_at ? ms(one.ready_at - one.first_signalled_at) : "–"),
      long(one.replicas.map((each) => `${each.replica}: ${each.error ?? (each.stage === "idle" ? "ready" : each.stage)}`).join(", ")), one.reset_prompt_cache] })));
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
  tables.sessions.empty = query ? "No session's key begins so." : "No session of this key's tenant is known.";
  tables.sessions.draw(rows.map((one) => ({
    key: one.id, open: () => openTrace(one.id), cells: [named(one.id), named(one.replica), num(one.turns), num(one.open_turns), num(number(one.prompt_tokens)), num(share(one.cached_share)),
      num(number(one.generated_tokens)), num(ms(one.mean_time_to_first_token_s)), num(ms(one.mean_inter_token_s)), num(number(one.last_reward)), clock(one.used_at)] })));
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
    Object.assign(this, { act, mark, table: tables[section], seen: false, busy: false, at: 0, last: undefined });
    new IntersectionObserver(([entry]) => { this.seen = entry.isIntersecting; this.look(); }).observe($(section));
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
      this.table.say(error.message);
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

const rewards = () => known.rewards.filter((one) => !known.deployment || one.deployment === known.deployment);

let planned = 0;
function soon() {
  planned ||= requestAnimationFrame(() => { planned = 0; steady(() => draw()); });
}

function draw(anew = false) {
  if (!known.server) return;
  drawDeployments();
  drawReplicas();
  drawPolicies();
  drawErrors();
  if (known.samples.all.length) {
    charts.draw(known.samples, rewards(), anew);
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
