// A session's tokens, coloured by the snapshot that produced them. Owns: how a trace is read and shown.
// Always holds: a turn shows what it added to its parent's tokens, and then what was sampled.

import { colorOf, number, clock } from "./charts.js";

const UNDERLINES = ["solid", "dashed", "dotted", "double"];
// Of one turn; the rest is said to be there.
const TOKENS_SHOWN = 4000;
// Of all turns together.
const SPANS_SHOWN = 20000;

export const snapshotAt = (spans, position) => spans.find((span) => position >= span.start && position < span.end)?.snapshot ?? null;

// Expert numbers of one token: a list for each layer.
export function routeOf(encoded, dtype, shape) {
  const raw = Uint8Array.from(atob(encoded), (letter) => letter.charCodeAt(0));
  const experts = dtype === "uint16" ? new Uint16Array(raw.buffer) : raw;
  const [layers, top] = shape;
  return Array.from({ length: layers }, (_, layer) => [...experts.slice(layer * top, (layer + 1) * top)]);
}

export class Trace {
  constructor(place, legend, note, tip, texts) {
    Object.assign(this, { place, legend, note, tip, texts });
    place.addEventListener("mouseover", (event) => this.#tell(event.target));
    place.addEventListener("focusin", (event) => this.#tell(event.target));
    for (const kind of ["mouseout", "focusout"]) place.addEventListener(kind, () => { tip.hidden = true; });
    place.addEventListener("keydown", (event) => this.#step(event));
  }

  async show(key, told) {
    this.marks = new Map();
    this.about = new Map();
    this.place.replaceChildren();
    this.legend.replaceChildren();
    // Another session may be chosen while this one's texts are asked for.
    const mine = this.shown = Symbol(key);
    let tokens = 0, spans = 0, left = 0;
    for (const trace of told.traces) {
      for (const turn of trace.turns) {
        tokens += turn.token_ids.length;
        spans += Math.min(turn.added.length + turn.token_ids.length, TOKENS_SHOWN);
        if (spans > SPANS_SHOWN) { left += 1; continue; }
        const block = await this.#turn(trace, turn);
        if (this.shown !== mine) return;
        this.place.append(block);
      }
    }
    for (const [snapshot, at] of this.marks) {
      const item = document.createElement("li");
      item.textContent = snapshot;
      item.style.setProperty("--mark", colorOf(at));
      this.legend.append(item);
    }
    const turns = told.traces.reduce((count, trace) => count + trace.turns.length, 0);
    const lost = told.traces.some((trace) => trace.forgotten) ? " Older turns were dropped for want of memory." : "";
    const silent = told.unreachable.length ? ` No answer of ${told.unreachable.join(", ")}.` : "";
    this.note.textContent = `${key}: ${turns} turns, ${tokens} sampled tokens.${left ? ` The last ${left} turns are too many to show.` : ""}${lost}${silent} Arrow keys go from token to token.`;
  }

  #mark(snapshot) {
    if (!this.marks.has(snapshot)) this.marks.set(snapshot, this.marks.size);
    return this.marks.get(snapshot);
  }

  async #turn(trace, turn) {
    const block = document.createElement("article");
    block.className = "turn";
    const head = document.createElement("h3");
    const rewards = trace.rewards.filter((one) => one.turn === turn.turn).map((one) => `, ${one.name} ${number(one.reward)}`).join("");
    const after = turn.parent ? `after turn ${turn.parent}` : "first";
    const branch = turn.branch ? `, branch: ${turn.branch.why ?? "new"}` : "";
    head.textContent = `Turn ${turn.turn} on ${trace.replica}, ${after}, ${clock(turn.created)}, ${turn.finish_reason}${branch}${rewards}`;
    const ids = [...turn.added, ...turn.token_ids].slice(0, TOKENS_SHOWN);
    const texts = await this.texts(turn.model, ids);
    const line = document.createElement("div");
    line.className = "tokens";
    ids.forEach((id, at) => line.append(this.#token(turn, id, at - turn.added.length, texts[at])));
    if (ids.length < turn.added.length + turn.token_ids.length) line.append(" … and more");
    block.append(head, line);
    return block;
  }

  #token(turn, id, sampled, text) {
    const span = document.createElement("span");
    span.textContent = text === "" ? "·" : text;
    if (sampled < 0) {
      span.className = "given";
      return span;
    }
    const snapshot = snapshotAt(turn.snapshots, sampled) ?? "unknown";
    const mark = this.#mark(snapshot);
    span.className = "sampled";
    span.tabIndex = sampled ? -1 : 0;
    span.dataset.snapshot = snapshot;
    span.dataset.token = id;
    span.style.setProperty("--mark", colorOf(mark));
    span.style.setProperty("--under", UNDERLINES[Math.floor(mark / 2) % UNDERLINES.length]);
    this.about.set(span, { turn, id, sampled, snapshot });
    return span;
  }

  #tell(span) {
    const found = this.about?.get(span);
    if (!found) return;
    const { turn, id, sampled, snapshot } = found;
    const lines = [`token ${id}, number ${sampled} of turn ${turn.turn}`, `snapshot ${snapshot}`];
    if (turn.logprobs) lines.push(`logprob ${turn.logprobs[sampled].toFixed(4)} nats`);
    if (turn.sampling_logprobs?.[sampled] !== null && turn.sampling_logprobs) lines.push(`sampling logprob ${turn.sampling_logprobs[sampled].toFixed(4)} nats`);
    const route = turn.routing_matrix?.[sampled];
    if (route) lines.push(...routeOf(route, turn.routing_matrix_dtype, turn.routing_matrix_shape).map((experts, layer) => `layer ${layer}: experts ${experts.join(", ")}`));
    this.tip.textContent = lines.join("\n");
    const place = span.getBoundingClientRect();
    this.tip.hidden = false;
    this.tip.style.left = `${Math.max(4, Math.min(place.left, innerWidth - 280))}px`;
    this.tip.style.top = `${Math.min(place.bottom + 6, innerHeight - 40 - 18 * lines.length)}px`;
  }

  #step(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by || !this.about.has(event.target)) return;
    const all = [...this.about.keys()];
    const next = all[all.indexOf(event.target) + by];
    if (!next) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}
