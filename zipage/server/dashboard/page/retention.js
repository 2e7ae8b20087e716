// The retention view: an answer as it is generated, shaded by who still keeps each token.

// What one compression kept. `keepers[i]` lists hold token i; `layers[l * num + i]` of layer l.
function readRecord(told) {
  const bytes = told.layer_keepers ? Uint8Array.from(atob(told.layer_keepers), (c) => c.charCodeAt(0)) : null;
  return {
    num: told.num_tokens, length: told.length, kept: told.kept, lists: told.lists, seconds: told.seconds,
    keepers: told.keepers, layers: bytes, depth: told.layer_positions.length,
  };
}

const byId = (id) => document.getElementById(id);
const many = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

class RetentionView {
  constructor(request) {
    this.request = request; // fetch with the API key, raising the server's message
    this.clear();
    byId("ask").addEventListener("submit", (event) => { event.preventDefault(); this.run(); });
    byId("stop").addEventListener("click", () => this.abort?.abort());
    byId("moment").addEventListener("input", () => this.show(+byId("moment").value));
    byId("earlier").addEventListener("click", () => this.show(this.moment - 1));
    byId("later").addEventListener("click", () => this.show(this.moment + 1));
    byId("prompt").addEventListener("input", () => this.choose(null));
    const tokens = byId("tokens");
    tokens.addEventListener("pointerover", (event) => {
      const index = event.target.dataset?.i;
      if (index !== undefined) this.select(+index);
    });
    tokens.addEventListener("keydown", (event) => this.onKey(event));
    const point = (event) => {
      const box = byId("map").getBoundingClientRect();
      const share = Math.min(0.9999, Math.max(0, (event.clientX - box.left) / box.width));
      if (this.tokens.length) this.select(Math.floor(share * this.tokens.length), true);
    };
    byId("map").addEventListener("pointermove", point);
    byId("map").addEventListener("pointerdown", point);
    byId("breaks").addEventListener("change", () => {
      this.spans.forEach((span, i) => { span.textContent = this.shown(i); });
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.drawMap());
    new ResizeObserver(() => this.drawMemory()).observe(byId("memory-chart"));
    this.drawLegend();
  }

  begin(hello) {
    if (this.hello) { this.hello = hello; return; }
    this.hello = hello;
    const budget = byId("budget");
    budget.min = budget.step = hello.block_size;
    byId("run").disabled = !hello.has_tokenizer;
    if (!hello.has_tokenizer) byId("ask-error").textContent = "The model has no tokenizer, so that there is no text to show.";
    if (hello.compression === "full") byId("ask-error").textContent = "The server runs with --compression full: nothing is ever evicted.";
    for (const example of hello.examples) {
      const chip = make("button", { type: "button", "aria-pressed": "false" }, example.title);
      chip.addEventListener("click", () => this.choose(example));
      example.chip = chip;
      byId("examples").append(chip);
    }
    this.examples = hello.examples;
    byId("legend").querySelector("[data-kind=sink]").hidden = hello.num_sinks === 0;
    this.choose(hello.examples[0]);
  }

  choose(example) {
    for (const each of this.examples ?? []) each.chip.setAttribute("aria-pressed", String(each === example));
    this.example = example;
    if (!example) return;
    byId("prompt").value = example.prompt;
    byId("budget").value = example.kv_budget;
  }

  clear() {
    this.tokens = []; // texts
    this.spans = [];
    this.classes = [];
    this.records = [];
    this.promptLength = 0;
    this.moment = 0; // how many compressions are shown as done
    this.selected = null;
    this.state = "";
    byId("tokens").replaceChildren();
  }

  // ------------------------------------------------------------------ running

  async run() {
    this.abort?.abort();
    const abort = (this.abort = new AbortController());
    const { hello } = this;
    this.clear();
    this.expected = this.example?.answer ?? null;
    this.budget = +byId("budget").value;
    byId("ask-error").textContent = "";
    byId("run").disabled = true;
    byId("stop").hidden = false;
    this.state = "running";
    try {
      let prompt = byId("prompt").value;
      const maxTokens = +byId("max-tokens").value;
      let room = maxTokens;
      if (hello.is_chat) {
        const body = { messages: [{ role: "user", content: prompt }] };
        const encoded = await (await this.request("/tokenize", body, abort.signal)).json();
        prompt = encoded.tokens;
        room = Math.max(1, Math.min(maxTokens, encoded.max_model_len - encoded.count));
      }
      const response = await this.request("/v1/completions", {
        prompt, max_tokens: room, kv_budget: this.budget, stream: true, echo: true, logprobs: 0,
        skip_special_tokens: false, return_token_ids: true, return_kv_stats: true, kv_stats_layers: true,
      }, abort.signal);
      byId("result").hidden = false;
      byId("result-empty").hidden = true;
      for await (const { data } of events(response)) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        for (const choice of chunk.choices) this.take(choice);
      }
      if (this.state === "running") throw new Error("the stream ended early");
    } catch (error) {
      if (abort.signal.aborted) this.state = "stopped";
      else {
        this.state = "failed";
        byId("ask-error").textContent = error.message;
      }
    } finally {
      if (this.abort === abort) {
        byId("run").disabled = false;
        byId("stop").hidden = true;
        this.schedule();
      }
    }
  }

  take(choice) {
    if (choice.prompt_token_ids) this.promptLength = choice.prompt_token_ids.length;
    this.tokens.push(...(choice.logprobs?.tokens ?? []));
    const fresh = choice.kv_stats?.compressions ?? [];
    if (fresh.length) {
      const follows = this.moment === this.records.length;
      this.records.push(...fresh.map(readRecord));
      if (follows) this.moment = this.records.length;
    }
    if (choice.finish_reason) this.state = choice.finish_reason;
    this.schedule();
  }

  schedule() {
    if (this.frame) return;
    // A timer, not a frame: those stop while the page is in the background.
    this.frame = setTimeout(() => { this.frame = 0; this.render(); }, 60);
  }

  show(moment) {
    this.moment = Math.max(0, Math.min(this.records.length, moment));
    this.render();
    if (this.selected !== null) this.select(this.selected);
  }

  // ------------------------------------------------------------------ what is shown

  // Tokens of the text at the moment shown: until the next compression, or all there are.
  get limit() {
    return this.moment < this.records.length ? this.records[this.moment].num : this.tokens.length;
  }

  get record() {
    return this.moment ? this.records[this.moment - 1] : null;
  }

  // Tokens that each list holds then.
  get inMemory() {
    return this.record ? this.record.kept + this.limit - this.record.num : this.limit;
  }

  classOf(i) {
    const { record } = this;
    if (i >= this.limit) return "t future";
    let found = i < this.hello.num_sinks ? "t sink" : "t";
    if (!record) return found + " k10";
    if (i >= record.num) return found + " k10 new";
    if (i >= record.num - this.hello.window) found += " window";
    const keepers = record.keepers[i];
    if (!keepers) return found + " gone";
    // 10 means all, 1 to 9 some.
    const level = keepers === record.lists ? 10 : Math.max(1, Math.min(9, Math.round((keepers / record.lists) * 10)));
    return `${found} k${level}`;
  }

  render() {
    this.appendTokens();
    for (let i = 0; i < this.spans.length; i++) {
      const wanted = this.classOf(i) + (i === this.selected ? " at" : "");
      if (this.classes[i] !== wanted) this.spans[i].className = this.classes[i] = wanted;
    }
    this.drawMemory();
    this.drawMap();
    this.writeTexts();
  }

  appendTokens() {
    const box = byId("tokens");
    const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    const added = document.createDocumentFragment();
    for (let i = this.spans.length; i < this.tokens.length; i++) {
      if (i === 0) added.append(make("b", {}, "prompt"));
      if (i === this.promptLength) added.append(make("hr"), make("b", {}, "answer"));
      const span = make("span", { "data-i": i }, this.shown(i));
      this.spans.push(span);
      added.append(span);
    }
    if (!added.childNodes.length) return;
    box.append(added);
    if (atEnd && this.state === "running") box.scrollTop = box.scrollHeight;
  }

  // A token's text; as one paragraph it is easier to take in at a glance.
  shown(i) {
    return byId("breaks").checked ? this.tokens[i] : this.tokens[i].replaceAll("\n", "↵ ");
  }

  writeTexts() {
    const { records, moment, record, limit, inMemory } = this;
    const answer = this.tokens.length - this.promptLength;
    const summary = byId("summary");
    const words = {
      running: "Generating: ", stop: "Finished: ", length: "Cut at max_tokens: ", stopped: "Stopped: ", failed: "Failed: ", abort: "Aborted: ",
    }[this.state] ?? "";
    summary.replaceChildren(words, make("strong", {}, many(answer, "token")), " of answer, ", make("strong", {}, many(records.length, "compression")), ". ");
    if (this.expected !== null && (this.state === "stop" || this.state === "length")) {
      const boxed = this.tokens.slice(this.promptLength).join("").match(/\\boxed\{([^{}]*)\}(?!.*\\boxed)/s);
      const right = boxed?.[1].trim() === this.expected;
      summary.append(make("span", { class: "verdict " + (right ? "right" : "wrong") },
        right ? `right answer: ${this.expected}` : `wrong answer: ${boxed ? boxed[1] : "none"}, not ${this.expected}`));
    }
    const slider = byId("moment");
    slider.max = records.length;
    slider.value = moment;
    byId("earlier").disabled = moment === 0;
    byId("later").disabled = moment === records.length;
    let text = records.length ? "Before the first compression: every list keeps every token." : "Not compressed yet: every list keeps every token.";
    if (record) {
      const gone = record.keepers.reduce((sum, k) => sum + (k === 0), 0);
      const all = record.keepers.reduce((sum, k) => sum + (k === record.lists), 0);
      text = `Compression ${moment} of ${records.length}, after ${many(record.num, "token")}: each of the ${record.lists} lists went from ${record.length} to ${record.kept} tokens` +
        ` in ${duration(record.seconds)}. ${many(gone, "token")} gone everywhere, ${all} kept by all, ${record.num - gone - all} by some.`;
    }
    byId("moment-text").textContent = text;
    slider.setAttribute("aria-valuetext", text);
    this.setBars(limit, inMemory);
  }

  setBars(limit, inMemory) {
    const bars = byId("bars");
    if (!bars.firstChild) {
      for (const kind of ["", " kept"]) bars.append(make("div", { class: "bar" + kind }, make("span"), make("i")));
    }
    const share = limit ? inMemory / limit : 1;
    const rows = [[`${many(limit, "token")} in the text`, 1], [`${many(inMemory, "token")} in memory, ${percent(share)}`, share]];
    rows.forEach(([label, width], i) => {
      bars.children[i].firstChild.textContent = label;
      bars.children[i].lastChild.style.width = `${width * 100}%`;
    });
  }

  drawMemory() {
    const parent = byId("memory-chart");
    const width = parent.clientWidth, height = 130, left = 40, bottom = 18;
    const total = this.tokens.length;
    if (!width || !total) return;
    const x = (n) => left + (n / total) * (width - left);
    const top = ceiling(total), y = (n) => 4 + (1 - n / top) * (height - bottom - 4);
    const points = [[0, 0]];
    for (const { num, length, kept } of this.records) points.push([num, length], [num, kept]);
    const last = this.records[this.records.length - 1];
    points.push([total, last ? last.kept + total - last.num : total]);
    const line = points.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join("L");
    const label = `Tokens in memory while the text grows to ${total} tokens: at most ${Math.max(...points.map((p) => p[1]))}`;
    const svg = draw("svg", { class: "plot s-a", role: "img", viewBox: `0 0 ${width} ${height}`, "aria-label": label });
    for (const n of [0, top / 2, top]) {
      svg.append(draw("line", { class: "grid", x1: left, x2: width, y1: y(n), y2: y(n) }));
      svg.append(draw("text", { x: left - 6, y: y(n) + 4, "text-anchor": "end" }, short(n)));
    }
    svg.append(draw("path", { class: "full", d: `M${x(0)},${y(0)}L${x(total)},${y(total)}` }));
    svg.append(draw("path", { class: "under", d: `M${line}L${x(total)},${y(0)}Z` }), draw("path", { d: "M" + line }));
    svg.append(draw("line", { class: "cursor", x1: x(this.limit), x2: x(this.limit), y1: 4, y2: height - bottom }));
    svg.append(draw("text", { x: left, y: height - 3 }, "tokens in the text"), draw("text", { x: width, y: height - 3, "text-anchor": "end" }, String(total)));
    if (total > 60) svg.append(draw("text", { x: x(total * 0.7) - 8, y: y(total * 0.7) - 4, "text-anchor": "end" }, "full cache"));
    parent.replaceChildren(svg);
  }

  // A column for each token, or for a few of them; a row for each layer.
  drawMap() {
    const canvas = byId("map"), total = this.tokens.length;
    const { record, limit } = this;
    const depth = this.records[0]?.depth ?? 1;
    const columns = Math.max(1, Math.min(total, 800));
    canvas.width = columns;
    canvas.height = depth;
    byId("map-caption").textContent = record
      ? `${depth} layers × ${limit} positions: share of ${record.lists / depth} KV heads`
      : "Layers × positions";
    if (!total) return;
    const style = getComputedStyle(document.documentElement);
    const [low, high] = ["--map-low", "--map-high"].map((name) => style.getPropertyValue(name).trim().split(/\s+/).map(Number));
    const context = canvas.getContext("2d");
    const image = context.createImageData(columns, depth);
    const heads = record ? record.lists / depth : 1;
    for (let column = 0; column < columns; column++) {
      const from = Math.floor((column * total) / columns), to = Math.floor(((column + 1) * total) / columns);
      for (let layer = 0; layer < depth; layer++) {
        let sum = 0, shown = 0;
        for (let i = from; i < to && i < limit; i++) {
          shown++;
          if (!record || i >= record.num) sum += 1;
          else sum += record.layers ? record.layers[layer * record.num + i] / heads : record.keepers[i] / record.lists;
        }
        const at = 4 * (layer * columns + column), share = shown ? sum / shown : 0;
        for (let c = 0; c < 3; c++) image.data[at + c] = low[c] + (high[c] - low[c]) * share;
        image.data[at + 3] = shown ? 255 : 0;
      }
    }
    context.putImageData(image, 0, 0);
  }

  drawLegend() {
    const ramp = make("span", { class: "ramp" }, make("span", { class: "gone" }, "evicted everywhere"), " ");
    for (let level = 1; level <= 10; level++) ramp.append(make("i", { class: "k" + level }));
    ramp.append(" kept by all");
    byId("legend").append(ramp);
    for (const [name, label] of [["window", "window: its queries scored the rest"], ["new", "written since"], ["sink", "first tokens, always kept"]]) {
      byId("legend").append(make("span", { "data-kind": name }, make("span", { class: name }, label)));
    }
  }

  // ------------------------------------------------------------------ one token

  onKey(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 };
    let wanted = null;
    if (event.key in steps) wanted = (this.selected ?? -1) + steps[event.key];
    else if (event.key === "Home") wanted = 0;
    else if (event.key === "End") wanted = this.tokens.length - 1;
    if (wanted === null || !this.tokens.length) return;
    event.preventDefault();
    this.select(Math.max(0, Math.min(this.tokens.length - 1, wanted)), true);
  }

  select(i, scroll = false) {
    const before = this.selected;
    this.selected = i;
    for (const each of [before, i]) {
      if (each !== null && this.spans[each]) {
        this.spans[each].className = this.classes[each] = this.classOf(each) + (each === i ? " at" : "");
      }
    }
    const span = this.spans[i], box = byId("tokens");
    if (!span) return;
    if (scroll && (span.offsetTop < box.scrollTop || span.offsetTop > box.scrollTop + box.clientHeight - 20)) {
      box.scrollTop = span.offsetTop - box.clientHeight / 2;
    }
    this.writeDetail(i);
  }

  writeDetail(i) {
    const { record } = this;
    const where = i < this.promptLength ? "prompt" : "answer";
    const head = make("p", {}, make("span", { class: "piece" }, JSON.stringify(this.tokens[i]).slice(1, -1)), ` position ${i}, ${where}`);
    const told = make("p", {});
    const parts = [head, told];
    if (i >= this.limit) told.textContent = "Not written yet at this moment.";
    else if (!record) told.textContent = "In every list: nothing was evicted yet.";
    else if (i >= record.num) told.textContent = "In every list: written since this compression.";
    else {
      const keepers = record.keepers[i];
      told.textContent = `Kept by ${keepers} of ${record.lists} lists`;
      if (i >= record.num - this.hello.window) told.textContent += ", as part of the window";
      if (!keepers) {
        const since = this.records.findIndex((r) => r.keepers[i] === 0);
        told.textContent = `Evicted everywhere since compression ${since + 1}, after ${this.records[since].num} tokens`;
      }
      told.textContent += ".";
      if (record.layers) {
        const layers = make("div", { class: "layers" }), heads = record.lists / record.depth;
        for (let layer = 0; layer < record.depth; layer++) {
          const count = record.layers[layer * record.num + i], fill = make("i");
          fill.style.width = `${(100 * count) / heads}%`;
          layers.append(make("span", { class: "dim" }, `layer ${layer}`), make("span", { class: "track" }, fill), make("span", {}, `${count} of ${heads}`));
        }
        parts.push(layers);
      }
    }
    byId("detail").replaceChildren(...parts);
  }
}
