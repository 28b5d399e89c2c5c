const $ = id => document.getElementById(id);
const SETTINGS = ["system", "temperature", "top_p", "max_tokens", "seed"], STORE = "ptqpipe-chat";
const SAMPLES = {
  true: ["Explain in three sentences what quantization of a neural network is.", "Write a Python function that reverses a string.",
         "Compare tea and coffee in a table.", "Write a short poem about memory."],
  false: ["Once upon a time", "The capital of France is", "def fibonacci(n):\n", "To make a good cup of tea, you"],
};
const MOST = 50;  // chats that are kept
let chats = true, context = 0, model = null, turns = [], running = null, attached = [], past = [], current = null;

function fill(box, text, role, open = box.querySelector(".thought")?.open ?? false) {
  const marked = chats && role === "assistant";
  box.className = marked ? "text" : "plain";
  box.replaceChildren(marked ? answer_of(text, open) : text);
}

// What is said so far, drawn anew: a turn has its text, what may be done with it, and what it took.
function draw(follow = true) {
  $("empty").hidden = turns.length > 0;
  $("clear").hidden = turns.length === 0;
  const open = [...$("log").children].map(drawn => drawn.querySelector(".thought")?.open ?? false);
  $("log").replaceChildren(...turns.map((turn, at) => {
    const body = make("div");
    fill(body, turn.content, turn.failed ? "" : turn.role, open[at]);
    if (turn.images?.length) body.prepend(make("div", {className: "images"}, ...turn.images.map(picture)));
    const foot = make("div", {className: "foot"}, ...(turn.note ? [make("small", {textContent: turn.note})] : []));
    if (turn.content) foot.append(copier(() => turn.role === "user" ? turn.content : split_thought(turn.content).said.trim()));
    if (turn.role === "user") { if (!running) foot.append(button("Edit", () => edit(at))); }
    else if (at === turns.length - 1) foot.append(button("Regenerate", () => { turns.pop(); answer(); }));
    const writing = running && at === turns.length - 1;
    return make("article", {className: "turn " + (turn.failed ? "error " : writing ? "writing " : "") + turn.role, ariaBusy: writing ? "true" : null},
                body, ...(writing ? [] : [foot]));
  }));
  if (follow) bottom();
}

const picture = src => make("img", {src, alt: "attached image"});

// The images that go with the next message; a click takes one away again.
function showAttached() {
  $("attached").replaceChildren(...attached.map((src, at) => make("button", {
    type: "button", title: "Remove", onclick: () => { attached.splice(at, 1); showAttached(); }}, picture(src))));
}

const pane = () => document.querySelector("main");
function bottom() { pane().scrollTop = pane().scrollHeight; }
// Who has scrolled up to read is left there: what is written meanwhile moves the page of those at its end alone.
const at_end = () => pane().scrollHeight - pane().scrollTop - pane().clientHeight < 40;

function edit(at) {
  $("input").value = turns[at].content;
  attached = turns[at].images ?? [];
  showAttached();
  turns = turns.slice(0, at);
  keep();
  draw();
  $("input").focus();
}

// The chats of this browser, the last one first, and which of them is on the page. When storage is full the oldest go.
function keep() {
  const settings = Object.fromEntries(SETTINGS.map(id => [id, $(id).value]));
  past = past.filter(chat => chat.id !== current);
  if (turns.length) past.unshift({id: current ??= Date.now() + Math.random(), model, turns});
  for (past = past.slice(0, MOST);; past.pop()) {
    try { localStorage.setItem(STORE, JSON.stringify({past, current, settings})); break; }
    catch { if (past.length < 2) break; /* storage is off, or this chat alone is too much */ }
  }
  list_past();
}

function recall() {
  try {
    const found = JSON.parse(localStorage.getItem(STORE));
    for (const id of SETTINGS) $(id).value = found.settings[id] ?? $(id).value;
    past = found.past ?? [];
    const last = past.find(chat => chat.id === found.current);
    if (last?.model === model && !turns.length) ({turns, id: current} = last);
  } catch { /* nothing was kept */ }
  list_past();
}

function leave() {
  running?.abort();
  running = null; turns = []; current = null;
  $("send").textContent = "Send"; $("speed").hidden = true; $("past").open = false;
}

function list_past() {
  $("past").hidden = !past.length;
  $("chats").replaceChildren(...past.map(chat => make("div", {},
    make("button", {type: "button", textContent: chat.turns[0].content.slice(0, 80) || "image", title: chat.model, ariaCurrent: chat.id === current ? "true" : null,
      onclick: () => { leave(); ({turns, id: current} = chat); keep(); draw(); }}),
    make("button", {type: "button", className: "small", textContent: "✕", title: "Delete", ariaLabel: "Delete",
      onclick: () => { past = past.filter(other => other !== chat); if (chat.id === current) leave(); keep(); draw(); }}))));
}

function headers() {
  const found = {"Content-Type": "application/json"};
  if ($("key").value) found.Authorization = "Bearer " + $("key").value;
  return found;
}

async function problem(response) {
  if (response.status === 401) { $("needs_key").hidden = false; $("settings").open = true; $("key").focus(); }
  try { return (await response.json()).error.message; } catch { return "HTTP " + response.status; }
}

const size = (bytes, base, units) => {
  let at = 0;
  for (; bytes >= base && at < units.length - 1; at += 1) bytes /= base;
  return bytes.toFixed(bytes < 9.995 && at ? 2 : bytes < 99.95 && at ? 1 : 0) + " " + units[at];
};

function facts(found) {
  const d = found.details ?? {};
  return [
    d.architecture, d.formats?.join(" + "),
    d.bits_per_weight && `${d.bits_per_weight.toFixed(2)} bits per quantized weight`,
    d.weights_bytes && size(d.weights_bytes, 1000, ["B", "kB", "MB", "GB", "TB"]) + " on disk",
    d.resident_bytes && size(d.resident_bytes, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]) + " of memory",
    `context ${found.max_model_len} tokens`, d.instruction_set && d.instruction_set !== "none" && d.instruction_set.toUpperCase(),
    !chats && "no chat template: continues your text",
  ].filter(Boolean);
}

async function look() {
  try {
    const response = await fetch("v1/models", {headers: headers()});
    if (!response.ok) { $("name").textContent = $("model").textContent = await problem(response); return; }
    const found = (await response.json()).data[0];
    model = found.id; chats = found.chat ?? true; context = found.max_model_len;
    $("name").textContent = model;
    $("model").textContent = [model, found.details?.formats?.[0]].filter(Boolean).join(" · ");
    $("model").title = facts(found).join(", ");
    $("facts").replaceChildren(...facts(found).map(text => make("span", {textContent: text})));
    $("samples").replaceChildren(...SAMPLES[chats].map(text => make("button", {type: "button", textContent: text, onclick: () => ask(text)})));
    $("has_system").hidden = !chats;
    $("has_images").hidden = !found.details?.images;
    recall();
    draw();
  } catch (error) { $("name").textContent = $("model").textContent = "no answer from the server"; }
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      yield JSON.parse(line.slice(6));
    }
  }
}

// Without a number a chat may fill the context, a completion is OpenAI's 16 tokens: ask for what fits for certain, since
// a text has no more tokens than UTF-8 bytes, some at its ends aside.
function fits(text) {
  const room = context - new TextEncoder().encode(text).length - 8;
  return chats || room < 1 ? undefined : room;
}

const parts = (text, images) => [...images.map(url => ({type: "image_url", image_url: {url}})), {type: "text", text}];

function body() {
  const number = id => $(id).value === "" ? undefined : Number($(id).value);
  const said = turns.map(({role, content, images}) => ({role, content: images?.length ? parts(content, images) : content})), text = turns.at(-1).content;
  const system = $("system").value.trim() ? [{role: "system", content: $("system").value}] : [];
  const shared = {stream: true, stream_options: {include_usage: true}, temperature: number("temperature"),
                  top_p: number("top_p"), max_tokens: number("max_tokens") ?? fits(text), seed: number("seed")};
  return chats ? {...shared, messages: [...system, ...said]} : {...shared, prompt: text};
}

function meter(began, first, tokens) {
  const now = performance.now();
  $("speed").hidden = false;
  $("first").textContent = first ? Math.round(first - began) + " ms" : "–";
  $("count").textContent = tokens;
  if (tokens > 1 && now > first) $("rate").textContent = ((tokens - 1) / (now - first) * 1000).toFixed(1);
}

function ask(text) {
  if (running) return;
  if (turns.at(-1)?.failed) turns = turns.slice(0, -2);
  turns.push({role: "user", content: text, ...(attached.length ? {images: attached} : {})});
  attached = [];
  showAttached();
  answer();
}

// Asks for the next turn and shows it as it comes; what was stopped counts, what failed is shown and forgotten.
async function answer() {
  const control = running = new AbortController(), asked = body(), turn = {role: "assistant", content: ""};
  turns.push(turn);
  draw();
  const box = $("log").lastElementChild.firstElementChild, began = performance.now();
  $("send").textContent = "Stop";
  let first = 0, tokens = 0, usage = null, drawn = true;
  const redraw = () => {
    drawn = true;
    if (running !== control) return;
    const follow = at_end();
    fill(box, turn.content, "assistant");
    if (follow) bottom();
  };
  try {
    const response = await fetch(chats ? "v1/chat/completions" : "v1/completions",
      {method: "POST", headers: headers(), body: JSON.stringify(asked), signal: control.signal});
    if (!response.ok) throw new Error(await problem(response));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) usage = event.usage;
      const choice = event.choices[0], piece = chats ? choice?.delta.content : choice?.text;
      if (!piece) continue;
      first ||= performance.now();
      tokens += 1;
      turn.content += piece;
      meter(began, first, tokens);
      if (drawn) { drawn = false; requestAnimationFrame(redraw); }
    }
  } catch (error) { if (error.name !== "AbortError") { turn.failed = true; turn.content += (turn.content ? "\n" : "") + error.message; } }
  if (usage) meter(began, first, usage.completion_tokens);
  const what = usage ? `${usage.prompt_tokens} + ${usage.completion_tokens} tokens` : "stopped";
  if (!turn.failed) turn.note = `${what}, ${((performance.now() - began) / 1000).toFixed(2)} s`;
  if (running !== control) return;
  running = null;
  $("send").textContent = "Send";
  keep();
  draw(at_end());
}

$("form").addEventListener("submit", event => {
  event.preventDefault();
  if (running) { running.abort(); return; }
  const text = $("input").value;
  if (!text.trim() && !attached.length) return;
  $("input").value = "";
  ask(text);
});
$("input").addEventListener("keydown", event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!running) $("form").requestSubmit();  // the next message may be typed meanwhile: Enter does not stop an answer
});
document.addEventListener("keydown", event => { if (event.key === "Escape") running?.abort(); });
$("images").addEventListener("change", async () => {
  const read = file => new Promise(done => Object.assign(new FileReader(), {onload() { done(this.result); }}).readAsDataURL(file));
  attached.push(...await Promise.all([...$("images").files].map(read)));
  $("images").value = "";
  showAttached();
});
$("clear").addEventListener("click", () => { keep(); leave(); keep(); draw(); $("input").focus(); });
document.addEventListener("click", event => { if (!$("past").contains(event.target)) $("past").open = false; });
$("key").addEventListener("change", look);
$("settings").addEventListener("change", keep);
look();
