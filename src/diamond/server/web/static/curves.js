// The curves of one task or of several over each other, on any page that includes curves.html.
//
// What there is comes from GET /api/v1/tasks/ID/metrics, points from …/metrics/curve: few at first, finer ones for the
// part that is zoomed into. A chart asks only while somebody can see it, and only for what grew since.
import { Chart, html, keyButton } from "./chart.js";

const FEW = 400, MANY = 2000, REST_MS = 2000, MOST_REST_MS = 30000, AT_ONCE = 4, AGAIN_MS = 3000, TRIES = 10;
const USAGE = "Use of the machine";
const USAGE_CHARTS = [
  [/^sys\/cpu_percent$/, "CPU (100 % is one core)", "percent", () => ""],
  [/^sys\/rss_bytes$/, "Memory", "bytes", () => ""],
  [/^sys\/node(\d+)\/cpu_percent$/, "CPU (100 % is one core)", "percent", (found) => `Node ${found[1]}`],
  [/^sys\/node(\d+)\/rss_bytes$/, "Memory", "bytes", (found) => `Node ${found[1]}`],
  [/^sys\/node(\d+)\/gpu_percent$/, "GPU", "percent", (found) => `Node ${found[1]}`],
  [/^sys\/node(\d+)\/gpu_mem_bytes$/, "GPU memory", "bytes", (found) => `Node ${found[1]}`],
  [/^sys\/gpu(\d+)_percent$/, "GPU", "percent", (found) => `GPU ${found[1]}`],
  [/^sys\/gpu(\d+)_mem_bytes$/, "GPU memory", "bytes", (found) => `GPU ${found[1]}`],
];

// ---- Asking the server ------------------------------------------------------------------------------------------

const queue = [];
let asking = 0;

function ask(path, signal) {
  return new Promise((resolve, reject) => { queue.push({ path, signal, resolve, reject }); next(); });
}

async function next() {
  if (asking >= AT_ONCE || !queue.length) return;
  const { path, signal, resolve, reject } = queue.shift();
  asking += 1;
  try {
    signal?.throwIfAborted();
    const answer = await fetch(path, { signal, headers: { Accept: "application/json" } });
    if (!answer.ok) throw new Error(`${answer.status}`);
    resolve(await answer.json());
  } catch (error) { reject(error); } finally { asking -= 1; next(); }
}

function address(task, what, query) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null);
  return `/api/v1/tasks/${encodeURIComponent(task)}/${what}?${new URLSearchParams(given)}`;
}

// ---- One curve of one task: its points, over all jobs of a chain ------------------------------------------------

class Source {
  constructor(run, key, stream) {
    Object.assign(this, { run, key, stream, held: new Map(), points: [], gaps: [], exact: true, fresh: false });
  }

  get counts() { return this.run.counts(this.key, this.stream); }
  get grew() { return !this.fresh || [...this.counts].some(([attempt, count]) => this.held.get(attempt)?.count !== count); }

  // Brings `points` up to date; cheap where only the end is new.
  async load(x, most) {
    const again = this.x !== x || this.most < most;
    if (again) { this.held.clear(); this.x = x; this.most = most; }
    for (const [attempt, count] of this.counts) {
      const held = this.held.get(attempt);
      if (held?.count === count) continue;
      const curve = await this.#extended(attempt, count, held, x, most) ?? await this.#read(attempt, x, { max_points: most });
      this.held.set(attempt, { count, curve });
    }
    for (const attempt of this.held.keys()) if (!this.counts.has(attempt)) this.held.delete(attempt);
    Object.assign(this, this.#joined([...this.held.values()].map((each) => each.curve), x));
    const ends = [...this.points.map((point) => point[0]), ...this.gaps.flat()];
    this.whole = ends.length ? [ends.reduce((a, b) => Math.min(a, b)), ends.reduce((a, b) => Math.max(a, b))] : undefined;
    this.fresh = true;
  }

  // The known points with those that came after, unless there are too many or the program went back.
  async #extended(attempt, count, held, x, most) {
    const last = held?.curve.points.at(-1)?.[0];
    if (last === undefined || !held.curve.exact || held.curve.gaps.length) return null;
    const kept = held.curve.points.filter((point) => point[0] < last);
    const end = await this.#read(attempt, x, { max_points: most, x_min: last });
    if (!end.exact || kept.length + end.count < count || kept.length + end.points.length > most) return null;
    return { ...end, points: [...kept, ...end.points] };
  }

  #read(attempt, x, query, signal) {
    return ask(address(this.run.id, "metrics/curve", { key: this.key, stream: this.stream, attempt, x, ...query }), signal);
  }

  // A resumed job may do some steps again: from there on, what it did counts.
  #joined(curves, x) {
    let points = [], gaps = [], exact = true;
    for (const curve of curves) {
      const first = Math.min(curve.points[0]?.[0] ?? Infinity, curve.gaps[0]?.[0] ?? Infinity);
      points = points.filter((point) => point[0] < first).concat(curve.points);
      gaps = gaps.filter((gap) => gap[1] < first).concat(curve.gaps);
      exact &&= curve.exact;
    }
    if (x === "time") {
      const start = this.start = this.run.start ?? points[0]?.[0] ?? 0;
      points = points.map(([at, ...rest]) => [at - start, ...rest]);
      gaps = gaps.map(([from, to]) => [from - start, to - start]);
    } else this.start = 0;
    return { points, gaps, exact };
  }

  // Finer points of a part of the curve; a little more than the part, so that lines reach its edges.
  async detail([low, high], signal) {
    const more = (high - low) * 0.05;
    const range = { x_min: low - more + this.start, x_max: high + more + this.start, max_points: MANY };
    const curves = [];
    for (const attempt of this.held.keys()) curves.push(await this.#read(attempt, this.x, range, signal));
    const start = this.start, joined = this.#joined(curves, this.x);
    this.start = start;
    return joined;
  }
}

// ---- One task ---------------------------------------------------------------------------------------------------

class Run {
  constructor(raw, number) {
    this.id = raw.id;
    this.number = number;
    this.known = new Map(); // of each attempt: its series
    this.chosen = null;
    this.update(raw);
  }

  update(raw) {
    const ended = this.ended && raw.ended; // the last numbers may have come together with the end
    Object.assign(this, { name: raw.name, ended: raw.ended, settled: ended });
    // Jobs that go on with each other's work are one run; a retry from the beginning is another.
    this.chains = [];
    for (const job of raw.jobs) {
      if (job.continues && this.chains.length) this.chains.at(-1).push(job); else this.chains.push([job]);
    }
  }

  get chain() { return this.chains.find((chain) => chain[0].attempt === this.chosen) ?? this.chains.at(-1) ?? []; }
  get start() { return this.chain.find((job) => job.start !== null)?.start ?? null; }

  async list() {
    for (const job of this.chain) {
      const last = job === this.chain.at(-1);
      if (this.known.has(job.attempt) && !last) continue;
      if (this.settled && this.known.has(job.attempt)) continue;
      const { series } = await ask(address(this.id, "metrics", { attempt: job.attempt }));
      this.known.set(job.attempt, new Map(series.map((each) => [`${each.stream} ${each.key}`, each.count])));
    }
  }

  counts(key, stream) {
    const found = new Map();
    for (const { attempt } of this.chain) {
      const count = this.known.get(attempt)?.get(`${stream} ${key}`);
      if (count) found.set(attempt, count);
    }
    return found;
  }

  get keys() { return new Set(this.chain.flatMap(({ attempt }) => [...(this.known.get(attempt)?.keys() ?? [])])); }
}

// ---- One chart --------------------------------------------------------------------------------------------------

class Panel {
  constructor(page, name, unit, group) {
    Object.assign(this, { page, name, unit, group, curves: new Map(), seen: false });
    this.figure = html("figure", { class: "chart" });
    this.chart = new Chart(this.figure, {
      title: name, x: group === USAGE ? "time" : page.x, y: unit, legend: group === USAGE,
      onZoom: (range) => this.#zoomed(range), onSize: (large) => { this.most = large ? MANY : FEW; page.groups(); this.load(); },
    });
    this.most = FEW;
    this.figure.panel = this;
  }

  add(run, key, stream, part) {
    const id = `${run.id} ${stream} ${key}`;
    if (this.curves.has(id)) return;
    const alone = this.page.runs.length === 1;
    const nth = [...this.curves.values()].filter((each) => each.source.run === run).length;
    const label = alone ? part || this.name : part ? `${run.name}, ${part}` : run.name;
    this.curves.set(id, {
      id, label, source: new Source(run, key, stream), points: [], gaps: [], exact: true, hidden: false,
      colour: alone ? nth : run.number, dash: alone ? undefined : part ? nth % 4 : undefined,
    });
  }

  async load() {
    if (!this.seen || this.figure.hidden) return;
    if (this.loading) { this.again = true; return; }
    this.loading = true;
    const x = this.group === USAGE ? "time" : this.page.x;
    try {
      const wanted = [...this.curves.values()].filter(({ source }) => source.grew || source.x !== x || (source.most < this.most && !source.exact));
      await Promise.all(wanted.map(({ source }) => source.load(x, this.most)));
      this.show();
      this.failed = 0;
    } catch {
      // A server that restarts; what is shown stays until it is back.
      this.failed = (this.failed ?? 0) + 1;
      if (this.failed < TRIES) setTimeout(() => this.load(), AGAIN_MS);
    } finally {
      this.loading = false;
      if (this.again) { this.again = false; this.load(); }
    }
  }

  show() {
    const { chart, page } = this;
    // While another axis is being fetched, the old one stays.
    const x = [...this.curves.values()].find(({ source }) => source.fresh)?.source.x ?? chart.x;
    if (chart.x !== x) chart.range && chart.zoom(null);
    Object.assign(chart, { x, logX: page.logX && this.group !== USAGE, weight: page.weight });
    const range = chart.range;
    for (const curve of this.curves.values()) {
      const from = range && curve.fine && curve.fineOf[0] <= range[0] && curve.fineOf[1] >= range[1] ? curve.fine : curve.source;
      Object.assign(curve, { points: from.points, gaps: from.gaps, exact: from.exact, whole: curve.source.whole });
      if (page.runs.length > 1) curve.hidden = page.off.has(curve.source.run.id);
    }
    chart.show([...this.curves.values()].filter(({ source }) => source.fresh));
  }

  async #zoomed(range) {
    this.asked?.abort();
    if (!range) { for (const curve of this.curves.values()) curve.fine = null; return this.show(); }
    this.asked = new AbortController();
    const { signal } = this.asked;
    await Promise.all([...this.curves.values()].filter(({ source, hidden }) => !source.exact && !hidden).map(async (curve) => {
      try { curve.fine = await curve.source.detail(range, signal); curve.fineOf = range; } catch { /* the coarse ones stay */ }
    }));
    if (!signal.aborted) this.show();
  }
}

// ---- All of them ------------------------------------------------------------------------------------------------

class Page {
  constructor(section) {
    this.section = section;
    this.find = (name) => section.querySelector(`[data-part="${name}"]`);
    this.panels = new Map();
    this.off = new Set(); // runs that are switched off
    this.unwanted = new Set(); // metrics that are not to be shown
    this.runs = [];
    this.#restore();
    this.watcher = new IntersectionObserver((seen) => {
      for (const { target, isIntersecting } of seen) { target.panel.seen = isIntersecting; if (isIntersecting) target.panel.load(); }
    }, { rootMargin: "800px" });
    this.#controls();
    this.refresh();
    document.addEventListener("diamond:fresh", () => this.refresh());
    section.dataset.ready = "";
    const values = section.querySelector("details.values");
    if (values) values.open = false;
  }

  // Called whenever something changed; looks at once if a run ended, and otherwise not more often than can be seen.
  refresh() {
    clearTimeout(this.timer);
    const told = this.#told();
    const news = told.some((each) => each.ended && !this.runs.find((run) => run.id === each.id)?.ended);
    this.timer = setTimeout(() => this.#look(told), news ? 0 : Math.max(0, (this.last ?? 0) + this.#rest() - Date.now()));
  }

  #told() { return JSON.parse(this.section.querySelector("[data-runs]").dataset.runs); }

  // What comes in a hundredth of a run's time moves its curves by a few pixels.
  #rest() {
    const ages = this.runs.filter((run) => !run.ended && run.start).map((run) => Date.now() - 1000 * run.start);
    return ages.length ? Math.min(MOST_REST_MS, Math.max(REST_MS, Math.min(...ages) / 100)) : REST_MS;
  }

  async #look(told) {
    this.last = Date.now();
    told.forEach((each, number) => {
      const known = this.runs.find((run) => run.id === each.id);
      if (known) known.update(each); else this.runs.push(new Run(each, number));
    });
    const listed = await Promise.allSettled(this.runs.map((run) => run.list()));
    const failed = listed.some((each) => each.status === "rejected");
    this.failed = failed ? (this.failed ?? 0) + 1 : 0;
    if (failed && this.failed < TRIES) setTimeout(() => this.refresh(), AGAIN_MS);
    this.#arrange();
    if (failed) this.find("nothing").hidden = true; // nobody knows
    for (const panel of this.panels.values()) panel.load();
  }

  #arrange() {
    for (const run of this.runs) {
      for (const id of run.keys) {
        const [stream, key] = [id.slice(0, id.indexOf(" ")), id.slice(id.indexOf(" ") + 1)];
        const usage = stream === "util" && USAGE_CHARTS.map((each) => [key.match(each[0]), each]).find(([found]) => found);
        if (usage) this.#panel(usage[1][1], usage[1][2], USAGE).add(run, key, stream, usage[1][3](usage[0]));
        else this.#panel(key, "number", stream === "util" ? USAGE : group(key)).add(run, key, stream, "");
      }
    }
    this.#choices();
    this.find("nothing").hidden = this.panels.size > 0;
    this.find("tools").hidden = this.panels.size === 0;
    this.#attempts();
    this.#legend();
  }

  #panel(name, unit, under) {
    const id = `${under} ${name}`;
    if (!this.panels.has(id)) {
      const panel = new Panel(this, name, unit, under);
      this.panels.set(id, panel);
      this.#place(panel, under, name);
      panel.figure.hidden = this.unwanted.has(id);
      this.watcher.observe(panel.figure);
    }
    return this.panels.get(id);
  }

  // Groups and the charts in them by name; what the machine did comes last.
  #place(panel, under, name) {
    const charts = this.find("charts");
    const rank = (text) => (text === USAGE ? `\uffff${text}` : text);
    let box = [...charts.children].find((each) => each.dataset.group === under);
    if (!box) {
      box = html("section", { "data-group": under }, html("h3", {}, html("bdi", {}, under || "Metrics")), html("div", { class: "charts" }));
      charts.insertBefore(box, [...charts.children].find((each) => rank(each.dataset.group) > rank(under)) ?? null);
    }
    panel.figure.dataset.name = name;
    const inside = box.lastChild;
    inside.insertBefore(panel.figure, [...inside.children].find((each) => each.dataset.name > name) ?? null);
  }

  // The others are drawn anew when they come into view.
  redraw() { for (const panel of this.panels.values()) if (panel.seen) panel.show(); }

  #controls() {
    const on = (name, event, act) => this.find(name).addEventListener(event, act);
    on("x", "change", (event) => { this.x = event.target.value; this.#remember(); for (const panel of this.panels.values()) panel.load(); });
    on("log-x", "change", (event) => { this.logX = event.target.checked; this.#remember(); this.redraw(); });
    on("log-y", "change", (event) => {
      for (const panel of this.panels.values()) if (panel.group !== USAGE) panel.chart.set({ logY: event.target.checked });
    });
    on("smooth", "input", (event) => { this.weight = Number(event.target.value); this.#said(); this.redraw(); });
    on("smooth", "change", () => this.#remember());
    on("filter", "input", () => this.#filter());
    this.find("x").value = this.x;
    this.find("log-x").checked = this.logX;
    this.find("smooth").value = this.weight;
    this.#said();
  }

  #said() { this.find("smooth-shown").textContent = this.weight ? this.weight.toFixed(2) : "off"; }

  // Kept in the address, so that a link shows the same.
  #remember() {
    const state = new URLSearchParams();
    if (this.x !== "step") state.set("x", this.x);
    if (this.logX) state.set("log", "x");
    if (this.weight) state.set("smooth", String(this.weight));
    for (const each of this.unwanted) state.append("hide", each);
    history.replaceState(history.state, "", `${location.pathname}${location.search}${String(state) && `#curves:${state}`}`);
  }

  #restore() {
    const state = new URLSearchParams(location.hash.startsWith("#curves:") ? location.hash.slice(8) : "");
    this.x = state.get("x") === "time" ? "time" : "step";
    this.logX = state.get("log") === "x";
    this.weight = Math.min(0.99, Math.max(0, Number(state.get("smooth")) || 0));
    this.unwanted = new Set(state.getAll("hide"));
  }

  #choices() {
    const list = this.find("keys");
    const ids = [...this.panels.keys()].sort();
    const have = new Set([...list.children].map((each) => each.dataset.id));
    ids.forEach((id, at) => {
      if (have.has(id)) return;
      const panel = this.panels.get(id);
      const box = html("input", { type: "checkbox" });
      box.checked = !this.unwanted.has(id);
      box.addEventListener("change", () => {
        if (box.checked) this.unwanted.delete(id); else this.unwanted.add(id);
        panel.figure.hidden = !box.checked;
        this.groups();
        this.#remember();
        panel.load();
      });
      list.insertBefore(html("li", { "data-id": id }, html("label", {}, box, html("bdi", {}, panel.name))), list.children[at] ?? null);
    });
    this.find("count").textContent = String(ids.length);
    this.groups();
  }

  // A group of which nothing is shown has no heading either.
  groups() {
    for (const box of this.find("charts").children) {
      const shown = [...box.lastChild.children].filter((each) => !each.hidden);
      box.hidden = shown.length === 0;
      box.classList.toggle("single", shown.length === 1 && !shown[0].classList.contains("large"));
    }
  }

  #filter() {
    const wanted = this.find("filter").value.trim().toLowerCase();
    for (const each of this.find("keys").children) each.hidden = !each.textContent.toLowerCase().includes(wanted);
  }

  // Retries from the beginning are runs of their own: one at a time.
  #attempts() {
    const field = this.find("attempt-field"), select = this.find("attempt");
    const chains = this.runs.length === 1 ? this.runs[0].chains : [];
    field.hidden = chains.length < 2;
    if (select.options.length === chains.length || field.hidden) return;
    const newest = select.selectedIndex <= 0;
    select.replaceChildren(...[...chains].reverse().map((chain) => html("option", { value: chain[0].attempt },
      chain.length > 1 ? `${chain[0].attempt} to ${chain.at(-1).attempt}` : `${chain[0].attempt}`)));
    if (!newest) select.value = this.runs[0].chosen;
    select.onchange = async () => {
      this.runs[0].chosen = Number(select.value) === chains.at(-1)[0].attempt ? null : Number(select.value);
      for (const panel of this.panels.values()) for (const { source } of panel.curves.values()) source.fresh = false;
      this.last = 0;
      this.refresh();
    };
  }

  #legend() {
    const list = this.find("runs");
    list.hidden = this.runs.length < 2;
    if (list.hidden || list.children.length === this.runs.length) return;
    list.replaceChildren(...this.runs.map((run) => {
      const button = keyButton({ label: run.name, colour: run.number, hidden: this.off.has(run.id) }, () => {
        if (this.off.has(run.id)) this.off.delete(run.id); else this.off.add(run.id);
        button.setAttribute("aria-pressed", String(!this.off.has(run.id)));
        this.redraw();
      });
      return html("li", {}, button);
    }));
  }
}

function group(key) { const at = key.lastIndexOf("/"); return at > 0 ? key.slice(0, at) : ""; }

for (const section of document.querySelectorAll("[data-curves]")) new Page(section);
