// The live view: tiles and charts of the samples that the server sends once a second.

const TILES = [
  ["Generated tokens/s", (s) => short(s.generated)],
  ["Requests running", (s) => short(s.running)],
  ["Requests waiting", (s) => short(s.waiting)],
  ["KV pool in use", (s) => percent(pool(s) ? s.owned / pool(s) : null)],
  ["Compressions/s", (s) => short(s.compressions)],
  ["First token, median", (s) => duration(s.ttft_p50)],
  ["Between tokens, median", (s) => duration(s.inter_token_p50)],
  ["Requests so far", (s) => short(s.totals.requests)],
];

const pool = (sample) => sample.owned + sample.cached + sample.free;

const CHARTS = [
  { title: "KV pool", unit: "blocks by state", wide: true, stacked: true, top: (all) => Math.max(1, ...all.map(pool)),
    series: [{ key: "owned", label: "owned", color: "a" }, { key: "cached", label: "cached for prefixes", color: "b" }, { key: "free", label: "free", color: "free" }] },
  { title: "Throughput", unit: "tokens/s", series: [{ key: "generated", label: "generated", color: "a" }, { key: "prompt", label: "prompt", color: "b" }] },
  { title: "Requests", series: [{ key: "running", label: "running", color: "a" }, { key: "waiting", label: "waiting", color: "c" }, { key: "compressing", label: "compressing", color: "d" }] },
  { title: "Compressions", unit: "a second", series: [{ key: "compressions", label: "finished", color: "a" }] },
  { title: "Evicted tokens", unit: "a second, of each layer and head", series: [{ key: "evicted", label: "evicted", color: "c" }] },
  { title: "Time to first token", unit: "of the last minute", format: duration, none: "no first token in the last minute",
    series: [{ key: "ttft_p50", label: "median", color: "a" }, { key: "ttft_p95", label: "95 %", color: "c" }] },
  { title: "Time between tokens", unit: "of the last minute", format: duration, none: "no tokens in the last minute",
    series: [{ key: "inter_token_p50", label: "median", color: "a" }, { key: "inter_token_p95", label: "95 %", color: "c" }] },
  { title: "Query slots", unit: "in use, of all", series: [{ key: "slots_used", label: "in use", color: "a" }, { key: "slots", label: "all", color: "free" }] },
  { title: "Prefix cache", unit: "prompt tokens found, last minute", format: percent, top: () => 1, none: "no prompt in the last minute",
    series: [{ key: "hit_rate", label: "hit rate", color: "b" }] },
  { title: "Preemptions", unit: "a second", series: [{ key: "recomputed", label: "recomputed", color: "c" }, { key: "swaps", label: "swapped", color: "d" }] },
];

class LiveView {
  constructor() {
    this.samples = [];
    this.span = 300;
    this.tiles = TILES.map(([label]) => {
      const value = make("dd", {}, "–");
      document.getElementById("tiles").append(make("div", { class: "tile" }, make("dt", {}, label), value));
      return value;
    });
    this.charts = CHARTS.map((chart) => new TimeChart(document.getElementById("charts"), chart));
    new ResizeObserver(() => this.render()).observe(document.getElementById("charts"));
  }

  begin(hello) {
    this.span = hello.history;
    this.samples = hello.samples;
    this.budget = hello.kv_budget;
    this.block = hello.block_size;
    this.render();
  }

  add(sample) {
    this.samples.push(sample);
    if (this.samples.length > this.span) this.samples.shift();
    this.render();
  }

  render() {
    const last = this.samples[this.samples.length - 1];
    if (!last) return;
    TILES.forEach(([, text], i) => { this.tiles[i].textContent = text(last); });
    const { totals } = last;
    document.getElementById("live-empty").hidden = totals.requests > 0;
    const budget = this.budget === null ? "the whole cache is kept" : `${this.budget.toLocaleString("en")} tokens are kept per request`;
    document.getElementById("live-note").textContent =
      `${pool(last).toLocaleString("en")} blocks of ${this.block} tokens; ${budget}. Since the start: ` +
      `${short(totals.prompt)} prompt and ${short(totals.generated)} generated tokens, ${short(totals.compressions)} compressions, ` +
      `${short(totals.evicted)} tokens evicted, ${short(totals.preemptions)} preemptions, ${short(totals.errors)} failed answers, ` +
      `${short(totals.refusals)} refusals of a full queue, ${short(totals.restarts)} restarts of the engine.`;
    if (!document.getElementById("live").hidden) {
      // At first the charts show the last minute, later as much as there is.
      const age = last.time - this.samples[0].time;
      const span = Math.min(this.span, Math.max(60, Math.ceil(age / 60) * 60));
      for (const chart of this.charts) chart.update(this.samples, span);
    }
  }
}
