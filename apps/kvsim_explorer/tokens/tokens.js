// Draws tokens, moves the step, takes the selection. All numbers come from Python.
const CHUNK = 200;
const SHORTEST = 120;
const SETTLE = 250;
const LINE = 25;
const FATES = ["absent", "kept", "protected", "gone", "old"];
const KINDS = ["text", "blank", "special", "bytes", "number"];
const OLD = 4;
const GONE = 3;

const views = new WeakMap();

export default function (component) {
  const { data, parentElement, setStateValue } = component;
  let view = views.get(parentElement);
  if (!view) {
    view = new View(parentElement);
    views.set(parentElement, view);
  }
  view.send = setStateValue;
  view.take(data);
  return () => {
    view.close();
    views.delete(parentElement);
  };
}

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function numbers(Kind, text) {
  if (text === null) return null;
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i += 1) bytes[i] = raw.charCodeAt(i);
  return new Kind(bytes.buffer);
}

function short(value) {
  if (value === 0) return "0";
  return Math.abs(value) >= 0.001 ? value.toFixed(4) : value.toExponential(1);
}

function readRanges(text, count) {
  const found = new Set();
  for (const part of text.split(",").filter(Boolean)) {
    const [low, high = low] = part.split("-").map(Number);
    for (let i = low; i <= high && i < count; i += 1) found.add(i);
  }
  return found;
}

function writeRanges(positions) {
  const sorted = Int32Array.from(positions).sort();
  const parts = [];
  for (let i = 0; i < sorted.length; i += 1) {
    const low = sorted[i];
    while (i + 1 < sorted.length && sorted[i + 1] === sorted[i] + 1) i += 1;
    parts.push(low === sorted[i] ? `${low}` : `${low}-${sorted[i]}`);
  }
  return parts.join(",");
}

class View {
  constructor(parent) {
    this.header = "";
    this.step = null;
    this.selected = new Set();
    this.live = null;
    this.cursor = -1;
    this.told = -1;
    this.anchor = -1;
    this.playing = 0;
    this.painting = 0;
    this.timers = {};
    this.root = make("div", "root");
    parent.appendChild(this.root);
    this.build();
    this.hear = (event) => this.takeLive(event.detail);
    window.addEventListener("kvsim-tokens", this.hear);
  }

  close() {
    this.pause();
    for (const name of Object.keys(this.timers)) clearTimeout(this.timers[name]);
    window.removeEventListener("kvsim-tokens", this.hear);
    for (const pane of this.panes) pane.observer?.disconnect();
    this.root.remove();
  }

  build() {
    const bar = make("div", "bar");
    this.back = this.button("◀", "Step back", () => this.move(-1));
    this.player = this.button("▶ Play", "Play the steps", () => (this.playing ? this.pause() : this.play()));
    this.forward = this.button("▶", "Step forward", () => this.move(1));
    this.slider = make("input", "slider");
    this.slider.type = "range";
    this.slider.min = "0";
    this.slider.setAttribute("aria-label", "Decode step");
    this.slider.addEventListener("input", () => this.go(Number(this.slider.value)));
    this.counter = make("output", "counter");
    bar.append(this.back, this.player, this.forward, this.slider, this.counter);
    this.figures = make("p", "figures");
    this.figures.setAttribute("role", "status");
    this.legend = make("div", "legend");
    this.detail = make("p", "detail");
    this.detail.setAttribute("aria-live", "polite");
    this.picked = make("span", "picked");
    this.clear = this.button("Clear selection", "Clear the selection", () => this.select(new Set()));
    const row = make("div", "bar");
    const help = "Click, shift-click, ctrl-click; or arrows, shift-arrows, space; escape clears; , and . step.";
    row.append(this.picked, this.clear, make("span", "help", help));
    const grid = make("div", "grid");
    this.panes = ["Prompt", "Generated"].map((title) => this.pane(title, grid));
    const note = make("div", "notes");
    note.append(this.detail);
    this.root.append(bar, this.figures, this.legend, row, note, grid);
    this.root.addEventListener("keydown", (event) => this.stepKey(event));
  }

  button(text, label, act) {
    const button = make("button", "button", text);
    button.type = "button";
    button.setAttribute("aria-label", label);
    button.title = label;
    button.addEventListener("click", act);
    return button;
  }

  pane(title, grid) {
    const box = make("section", "pane");
    const heading = make("h4", "title", title);
    const list = make("div", "tokens");
    list.tabIndex = 0;
    list.setAttribute("role", "listbox");
    list.setAttribute("aria-multiselectable", "true");
    list.setAttribute("aria-label", `${title} tokens`);
    box.append(heading, list);
    grid.append(box);
    const pane = { title, heading, list, chunks: [], start: 0, end: 0, observer: null };
    list.addEventListener("click", (event) => {
      if (event.target.token !== undefined) this.pick(event.target.token, event);
    });
    list.addEventListener("mousedown", (event) => {
      if (event.shiftKey) event.preventDefault();
    });
    list.addEventListener("mouseover", (event) => {
      if (event.target.token !== undefined) this.tell(event.target.token);
    });
    list.addEventListener("mouseleave", () => this.tell(this.cursor));
    list.addEventListener("focus", () => {
      if (this.cursor < pane.start || this.cursor >= pane.end) {
        const seen = pane.chunks.find((chunk) => chunk.element.offsetTop + chunk.element.offsetHeight > list.scrollTop);
        if (seen) this.look(pane, seen.start, false);
      } else this.tell(this.cursor);
    });
    list.addEventListener("keydown", (event) => this.tokenKey(pane, event));
    return pane;
  }

  // The first line of the data says what it is: data that is there already is not read again.
  take(data) {
    const end = data.indexOf(10);
    const decoder = new TextDecoder();
    const header = decoder.decode(data.subarray(0, end));
    if (header === this.header) return;
    this.header = header;
    const found = JSON.parse(decoder.decode(data.subarray(end + 1)));
    const isNew = !this.data || found.recording !== this.data.recording;
    const had = this.data !== undefined;
    this.data = found;
    this.starts = numbers(Int32Array, found.starts);
    this.changes = numbers(Int32Array, found.changes);
    this.held = numbers(Int32Array, found.held);
    this.mass = numbers(Float32Array, found.mass);
    this.later = numbers(Float32Array, found.later);
    if (isNew) {
      this.kinds = numbers(Uint8Array, found.kinds);
      this.ids = numbers(Int32Array, found.ids);
      this.slider.max = String(found.steps);
      this.cursor = -1;
      this.told = -1;
      this.anchor = -1;
      this.fillPane(this.panes[0], 0, found.prompt);
      this.fillPane(this.panes[1], found.prompt, found.prompt + found.steps);
      if (had && this.step !== null) {
        this.select(new Set());
        this.go(Math.min(this.step, found.steps));
      }
    }
    if (window.kvsimTokens) this.takeLive(window.kvsimTokens);
    this.show();
  }

  takeLive(live) {
    if (!this.data || live.recording !== this.data.recording) return;
    this.live = live;
    this.levels = numbers(Uint8Array, live.levels);
    this.values = numbers(Float32Array, live.values);
    this.states = numbers(Float32Array, live.states);
    this.root.classList.toggle("attention", live.colour === "attention");
    if (this.step === null) {
      this.step = live.step;
      this.selected = readRanges(live.selected, this.count);
    }
    this.show();
  }

  get count() {
    return this.data.prompt + this.data.steps;
  }

  fillPane(pane, start, end) {
    pane.observer?.disconnect();
    pane.list.replaceChildren();
    Object.assign(pane, { start, end, chunks: [] });
    pane.heading.textContent = `${pane.title}: ${(end - start).toLocaleString("en")} tokens`;
    pane.observer = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        if (entry.isIntersecting) this.fill(entry.target.chunk);
        else this.empty(entry.target.chunk);
      }
    }, { root: pane.list, rootMargin: "600px 0px" });
    const { texts } = this.data;
    const columns = Math.max(20, (pane.list.clientWidth || 500) / 8.5);
    for (let from = start; from < end;) {
      let to = from;
      let letters = 0;
      let lines = 1;
      while (to < end && to - from < CHUNK) {
        const ends = texts[to].includes("\n");
        letters += texts[to].length + (this.kinds[to] === 4);
        lines += ends;
        to += 1;
        if (ends && to - from >= SHORTEST) break;
      }
      const element = make("div", "chunk");
      const chunk = { start: from, end: to, element, spans: null };
      element.chunk = chunk;
      element.setAttribute("role", "presentation");
      element.dataset.start = String(from);
      element.style.minHeight = `${(lines + Math.ceil(letters / columns)) * LINE}px`;
      pane.chunks.push(chunk);
      pane.list.append(element);
      pane.observer.observe(element);
      from = to;
    }
  }

  fill(chunk) {
    if (chunk.spans) return;
    chunk.spans = [];
    const { element } = chunk;
    const { prompt, steps } = this.data;
    const [first, size] = chunk.start < prompt ? [0, prompt] : [prompt, steps];
    for (let i = chunk.start; i < chunk.end; i += 1) {
      const kind = this.kinds[i];
      const text = this.data.texts[i];
      const span = make("span", "", kind === 1 ? "·".repeat(text.length) : text);
      span.token = i;
      span.id = `token-${i}`;
      span.setAttribute("role", "option");
      span.setAttribute("aria-posinset", String(i - first + 1));
      span.setAttribute("aria-setsize", String(size));
      span.painted = "";
      chunk.spans.push(span);
      element.append(span);
    }
    element.style.minHeight = "";
    this.paintChunk(chunk);
  }

  empty(chunk) {
    if (!chunk.spans) return;
    chunk.element.style.minHeight = `${chunk.element.offsetHeight}px`;
    chunk.element.replaceChildren();
    chunk.spans = null;
  }

  chunkOf(i) {
    const pane = this.panes[i < this.data.prompt ? 0 : 1];
    let low = 0;
    let high = pane.chunks.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (pane.chunks[middle].start <= i) low = middle;
      else high = middle - 1;
    }
    return pane.chunks[low];
  }

  // How often a position has changed sides by a step.
  turns(i, step) {
    let low = this.starts[i];
    let high = this.starts[i + 1];
    const first = low;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.changes[middle] <= step) low = middle + 1;
      else high = middle;
    }
    return low - first;
  }

  fate(i, step) {
    const { prompt, sink, recent } = this.data;
    if (i >= prompt + step) return 0;
    const turns = this.turns(i, step);
    if (turns & 1) return this.changes[this.starts[i] + turns - 1] === step ? GONE : OLD;
    return i < sink || i >= prompt + step - recent ? 2 : 1;
  }

  classOf(i) {
    let name = `${FATES[this.fate(i, this.step)]} ${KINDS[this.kinds[i]]}`;
    if (this.levels && this.live.colour === "attention") name += ` level${this.levels[i]}`;
    if (this.selected.has(i)) name += " selected";
    if (i === this.cursor) name += " cursor";
    if (this.step && i === this.data.prompt + this.step - 1) name += " query";
    return name;
  }

  paintChunk(chunk) {
    for (const span of chunk.spans) {
      const name = this.classOf(span.token);
      if (name !== span.painted) {
        span.className = name;
        span.painted = name;
        span.setAttribute("aria-selected", String(this.selected.has(span.token)));
      }
    }
  }

  show() {
    if (this.painting || this.step === null) return;
    this.painting = requestAnimationFrame(() => {
      this.painting = 0;
      this.paint();
    });
  }

  paint() {
    for (const pane of this.panes) {
      for (const chunk of pane.chunks) if (chunk.spans) this.paintChunk(chunk);
    }
    const { steps, words } = this.data;
    this.slider.value = String(this.step);
    this.slider.setAttribute("aria-valuetext", `step ${this.step} of ${steps}`);
    this.counter.textContent = `step ${this.step} of ${steps}`;
    this.back.disabled = this.step === 0;
    this.forward.disabled = this.step === steps;
    this.figures.textContent = this.figureText();
    const text = this.selected.size ? writeRanges(this.selected) : "none";
    this.picked.textContent = `Selected: ${text.length > 60 ? `${text.slice(0, 60)}…` : text} (${this.selected.size})`;
    this.clear.disabled = this.selected.size === 0;
    this.showLegend(words);
    this.tell(this.told);
  }

  figureText() {
    const { figures, label, several, texts } = this.data;
    const parts = [];
    if (this.step) {
      const mean = several ? " (mean over groups)" : "";
      for (const [name, values] of Object.entries(figures)) {
        const value = values[this.step - 1];
        if (value !== null) parts.push(`${name} ${value.toFixed(name === "tokens held" ? 0 : 4)}${mean}`);
      }
    } else parts.push("before step 1");
    if (several) parts.push(`${label} holds ${this.held[this.step].toLocaleString("en")} tokens`);
    else if (!this.step) parts.push(`tokens held ${this.held[0].toLocaleString("en")}`);
    const gone = this.gone();
    const named = gone.slice(0, 6).map((i) => `${i} ${JSON.stringify(texts[i])}`).join(", ");
    const count = `${gone.length.toLocaleString("en")} token${gone.length === 1 ? "" : "s"}`;
    parts.push(`${this.data.words.gone}: ${gone.length ? `${count}: ${named}` : "none"}${gone.length > 6 ? ", …" : ""}`);
    return parts.join(" · ");
  }

  gone() {
    if (this.goneAt !== this.step || this.goneOf !== this.changes) {
      this.goneAt = this.step;
      this.goneOf = this.changes;
      this.goneNow = [];
      for (let i = 0; i < this.data.prompt + this.step; i += 1) {
        if (this.fate(i, this.step) === GONE) this.goneNow.push(i);
      }
    }
    return this.goneNow;
  }

  showLegend(words) {
    const shading = this.live && this.live.colour === "attention" ? this.live.shading : null;
    const key = `${this.header} ${JSON.stringify(shading)}`;
    if (key === this.legendKey) return;
    this.legendKey = key;
    this.legend.replaceChildren();
    for (const fate of FATES.slice(1).concat(FATES[0])) {
      this.legend.append(make("span", `sample ${fate}`, words[fate]));
    }
    this.legend.append(make("span", "sample query", words.query));
    if (!shading) return;
    const ramp = make("span", "ramp");
    ramp.append(make("span", "", shading.before));
    shading.edges.forEach((edge, index) => {
      ramp.append(make("span", `sample level${index + 1}`, `≥ ${short(edge)}`));
    });
    this.legend.append(ramp, make("span", "", shading.after));
  }

  tell(i) {
    this.told = i;
    if (i < 0) {
      this.detail.textContent = "Point at a token, or walk to one with the arrow keys.";
      return;
    }
    const { texts, words } = this.data;
    const fate = this.fate(i, this.step);
    const turns = this.turns(i, this.step);
    const raw = texts[i].replaceAll("↵\n", "\n").replaceAll("⇥\t", "\t");
    const parts = [`position ${i}`];
    if (this.kinds[i] !== 4) parts.push(JSON.stringify(raw));
    if (this.ids) parts.push(`id ${this.ids[i]}`);
    parts.push(fate === OLD ? `${words.old} (step ${this.changes[this.starts[i] + turns - 1]})` : words[FATES[fate]]);
    const next = this.changes[this.starts[i] + turns];
    if (fate < GONE && this.starts[i] + turns < this.starts[i + 1]) parts.push(`${words.will} ${next}`);
    if (this.mass) {
      parts.push(`attention received in all steps ${short(this.mass[i])}`);
      if (this.starts[i] < this.starts[i + 1]) parts.push(`of it ${words.later} ${short(this.later[i])}`);
    }
    if (this.values && this.live.colour === "attention") parts.push(`from the selected tokens ${short(this.values[i])}`);
    if (this.states && this.live.step === this.step && !Number.isNaN(this.states[i])) {
      parts.push(`state m ${this.states[i].toPrecision(4)}`);
    }
    this.detail.textContent = parts.join(" · ");
  }

  go(step) {
    const to = Math.max(0, Math.min(this.data.steps, step));
    if (to === this.step) return;
    this.step = to;
    this.show();
    if (!this.playing) this.settle("step", () => this.step);
  }

  move(by) {
    this.pause();
    this.go(this.step + by);
  }

  play() {
    if (this.step === this.data.steps) this.go(0);
    const pace = Math.max(4, this.data.steps / 20);
    const began = performance.now();
    const from = this.step;
    const turn = (now) => {
      this.go(from + Math.floor(((now - began) / 1000) * pace));
      this.follow();
      if (this.step === this.data.steps) this.pause();
      else this.playing = requestAnimationFrame(turn);
    };
    this.player.textContent = "⏸ Pause";
    this.player.setAttribute("aria-label", "Pause");
    this.figures.setAttribute("aria-live", "off");
    this.playing = requestAnimationFrame(turn);
  }

  pause() {
    if (!this.playing) return;
    cancelAnimationFrame(this.playing);
    this.playing = 0;
    this.player.textContent = "▶ Play";
    this.player.setAttribute("aria-label", "Play the steps");
    this.figures.removeAttribute("aria-live");
    this.settle("step", () => this.step);
  }

  follow() {
    if (!this.step) return;
    const i = this.data.prompt + this.step - 1;
    const { list } = this.panes[1];
    const chunk = this.chunkOf(i);
    const top = chunk.element.offsetTop + (chunk.spans ? chunk.spans[i - chunk.start].offsetTop : 0);
    if (top < list.scrollTop || top + LINE > list.scrollTop + list.clientHeight) {
      list.scrollTop = top - list.clientHeight / 2;
    }
  }

  settle(name, value) {
    clearTimeout(this.timers[name]);
    this.timers[name] = setTimeout(() => this.send(name, value()), SETTLE);
  }

  select(positions) {
    this.selected = positions;
    this.show();
    this.settle("selected", () => writeRanges(this.selected));
  }

  pick(i, event) {
    const more = event.ctrlKey || event.metaKey;
    const chosen = new Set(more ? this.selected : []);
    if (event.shiftKey && this.anchor >= 0) {
      for (let k = Math.min(i, this.anchor); k <= Math.max(i, this.anchor); k += 1) chosen.add(k);
    } else {
      if (more ? chosen.has(i) : this.selected.size === 1 && this.selected.has(i)) chosen.delete(i);
      else chosen.add(i);
      this.anchor = i;
    }
    this.cursor = i;
    this.select(chosen);
    this.tell(i);
  }

  look(pane, i, scrolls = true) {
    this.cursor = i;
    const chunk = this.chunkOf(i);
    this.fill(chunk);
    const span = chunk.spans[i - chunk.start];
    pane.list.setAttribute("aria-activedescendant", span.id);
    if (scrolls) span.scrollIntoView({ block: "nearest" });
    this.tell(i);
    this.show();
  }

  stepKey(event) {
    if (event.key === "," || event.key === ".") {
      event.preventDefault();
      this.move(event.key === "," ? -1 : 1);
    }
  }

  tokenKey(pane, event) {
    const { key } = event;
    if (key === "Escape") {
      this.select(new Set());
      return;
    }
    if (key === " " || key === "Enter") {
      event.preventDefault();
      if (this.cursor >= 0) this.pick(this.cursor, { ctrlKey: true, shiftKey: event.shiftKey });
      return;
    }
    const to = this.target(pane, key);
    if (to === null) return;
    event.preventDefault();
    const from = this.cursor;
    this.look(pane, Math.max(pane.start, Math.min(pane.end - 1, to)));
    if (event.shiftKey) {
      if (this.anchor < 0) this.anchor = from;
      this.pick(this.cursor, { shiftKey: true });
    }
  }

  target(pane, key) {
    const i = this.cursor;
    switch (key) {
      case "ArrowLeft": return i - 1;
      case "ArrowRight": return i + 1;
      case "ArrowUp": return this.line(i, -1);
      case "ArrowDown": return this.line(i, 1);
      case "PageUp": return i - CHUNK / 2;
      case "PageDown": return i + CHUNK / 2;
      case "Home": return pane.start;
      case "End": return pane.end - 1;
      default: return null;
    }
  }

  // The token above or below, as the text happens to be broken.
  line(i, by) {
    const pane = this.panes[i < this.data.prompt ? 0 : 1];
    const here = this.chunkOf(i).spans[i - this.chunkOf(i).start].getClientRects()[0];
    let best = i;
    for (let k = i + by; k >= pane.start && k < pane.end; k += by) {
      const chunk = this.chunkOf(k);
      this.fill(chunk);
      const box = chunk.spans[k - chunk.start].getClientRects()[0];
      if (!box || Math.abs(box.top - here.top) < LINE / 2) continue;
      if (best !== i && Math.abs(box.top - best.top) > LINE / 2) break;
      const away = Math.abs(box.left - here.left);
      if (best === i || away < best.away) best = { token: k, top: box.top, away };
    }
    return best === i ? i : best.token;
  }
}
