"use strict";

function make(kind, properties = {}, ...children) {
  const made = Object.assign(document.createElement(kind), properties);
  made.append(...children);
  return made;
}

async function copy(text) {
  try { await navigator.clipboard.writeText(text); return; } catch { /* not over plain HTTP from elsewhere */ }
  const area = make("textarea", {value: text});
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

function button(label, act) { return make("button", {type: "button", className: "small", textContent: label, onclick: act}); }

function copier(text) {
  const made = button("Copy", async () => {
    await copy(text());
    made.textContent = "Copied";
    setTimeout(() => { made.textContent = "Copy"; }, 1200);
  });
  return made;
}

// Markdown to elements. Text gets into the page as text alone, never as HTML, and links lead to http and https alone.
const INLINE = new RegExp([/(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)/, /\*\*([^*]+)\*\*/, /(?<![\w*])\*([^\s*][^*]*)\*(?![\w*])/,
  /\[([^\][]+)\]\((https?:\/\/[^\s()]+)\)/, /(https?:\/\/[^\s<>()"'`]+[^\s<>()"'`.,;:!?])/].map(x => x.source).join("|"), "gs");
const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)[^`]*$/, HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/, QUOTE = /^ {0,3}>\s?(.*)$/, RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const ALIGN = /^[\s|:-]*-[\s|:-]*$/;
// What a model thinks before it answers; some templates open it in the prompt, so that an answer only closes it.
const THOUGHT = /^\s*<think>(.*?)(?:<\/think>|$)|^([^`]*?)<\/think>/s;

// Code in colours: comments by how a language writes them, texts, numbers, and words that most languages have.
const HASH = /^(py|python|python3|sh|bash|zsh|shell|console|ya?ml|toml|ruby|rb|perl|r|make|makefile|dockerfile|cmake|nix)$/i;
const DASH = /^(sql|lua|haskell|hs|ada)$/i, NO_CODE = /^(|text|txt|plain|plaintext|output|markdown|md|diff)$/i;
const WORDS = `abstract and as assert async await bool boolean break case catch char class const constexpr continue def default del do
double elif else enum except export extends extern False false final finally float fn for from func function global if impl implements
import in int interface is lambda let long loop match mod module mut namespace new nil None nonlocal not null of or package pass private
protected pub public raise return self Self short signed sizeof static struct super switch template then this throw trait True true try
type typedef typename undefined union unsigned use using var virtual void while with yield
select SELECT from FROM where WHERE join JOIN on ON group GROUP by BY order ORDER insert INSERT into INTO values VALUES create CREATE table
TABLE fi done esac echo export local`.split(/\s+/).join("|");
const STRING = /"""[\s\S]*?(?:"""|$)|'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*"|`(?:\\.|[^`\\])*`/.source;
const NUMBER = /\b\d[\w.]*\b/.source;

function inline(text) {
  const made = document.createDocumentFragment();
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    made.append(text.slice(end, found.index));
    const [whole, , code, bold, em, label, target, bare] = found;
    if (code !== undefined) made.append(make("code", {textContent: code}));
    else if (bold !== undefined) made.append(make("strong", {}, inline(bold)));
    else if (em !== undefined) made.append(make("em", {textContent: em}));
    else made.append(make("a", {href: target ?? bare, target: "_blank", rel: "noopener noreferrer", textContent: label ?? bare}));
    end = found.index + whole.length;
  }
  made.append(text.slice(end));
  return made;
}

function coloured(text, language) {
  const made = document.createDocumentFragment();
  if (NO_CODE.test(language)) { made.append(text); return made; }
  const remark = HASH.test(language) ? "#[^\\n]*" : DASH.test(language) ? "--[^\\n]*" : "//[^\\n]*|/\\*[\\s\\S]*?(?:\\*/|$)|<!--[\\s\\S]*?(?:-->|$)";
  let end = 0;
  for (const found of text.matchAll(new RegExp(`(${remark})|(${STRING})|(${NUMBER})|\\b(${WORDS})\\b`, "g"))) {
    const kind = ["remark", "string", "number", "word"][found.slice(1).findIndex(part => part !== undefined)];
    made.append(text.slice(end, found.index), make("span", {className: kind, textContent: found[0]}));
    end = found.index + found[0].length;
  }
  made.append(text.slice(end));
  return made;
}

function code_block(text, language) {
  return make("div", {className: "code"}, make("div", {}, make("span", {textContent: language || "text"}), copier(() => text)),
              make("pre", {}, make("code", {}, coloured(text, language))));
}

// What is thought and what is said in an answer; null for an answer without thoughts.
function split_thought(text) {
  const found = text.match(THOUGHT);
  return {thought: found && (found[1] ?? found[2]).trim(), done: !found || found[0].endsWith("</think>"), said: found ? text.slice(found[0].length) : text};
}

function answer_of(text, open) {
  const {thought, done, said} = split_thought(text), made = document.createDocumentFragment();
  if (thought !== null && (thought || !done)) made.append(make("details", {className: "thought", open},
    make("summary", {textContent: done ? "Thoughts" : "Thinking …"}), blocks(thought.split("\n"))));
  made.append(blocks(said.split("\n")));
  return made;
}

function table(lines) {
  const rows = lines.map(line => line.trim().replace(/^\||\|$/g, "").split("|").map(cell => cell.trim()));
  const side = rows[1].map(rule => rule.endsWith(":") ? (rule.startsWith(":") ? "center" : "right") : "");
  const row = (cells, kind) => make("tr", {}, ...cells.map((cell, at) => make(kind, side[at] ? {className: side[at]} : {}, inline(cell))));
  const body = make("tbody", {}, ...rows.slice(2).map(cells => row(cells, "td")));
  return make("div", {className: "scroll"}, make("table", {}, make("thead", {}, row(rows[0], "th")), body));
}

function list(lines, depth) {
  const first = lines[0].match(ITEM), items = [], ordered = /\d/.test(first[2]);
  for (const line of lines) {
    const found = line.match(ITEM);
    if (found && found[1].length <= first[1].length + 1) items.push([found[3]]);
    else items.at(-1).push(line.slice(Math.min(line.search(/\S|$/), first[1].length + 2)));
  }
  const made = items.map(([head, ...rest]) => make("li", {}, inline(head), ...(rest.length ? [blocks(rest, depth + 1)] : [])));
  const start = ordered ? {start: parseInt(first[2], 10)} : {};
  return make(ordered ? "ol" : "ul", start, ...made);
}

function blocks(lines, depth = 0) {
  const made = document.createDocumentFragment();
  for (let at = 0; at < lines.length;) {
    const line = lines[at], from = at;
    const run = test => { while (at < lines.length && test(lines[at], at)) at += 1; return lines.slice(from, at); };
    const fence = line.match(FENCE), heading = line.match(HEADING);
    if (!line.trim()) at += 1;
    else if (fence) {
      at += 1;
      const closing = text => text.trim().startsWith(fence[1]) && !text.trim().replace(/[`~]/g, "");
      const inside = run((text, place) => place === from || !closing(text)).slice(1);
      at += 1;
      made.append(code_block(inside.join("\n"), fence[2]));
    } else if (heading) { at += 1; made.append(make("h" + Math.min(heading[1].length + 2, 5), {}, inline(heading[2]))); }
    else if (RULE.test(line)) { at += 1; made.append(make("hr")); }
    else if (depth < 6 && QUOTE.test(line)) made.append(make("blockquote", {},
      blocks(run(text => QUOTE.test(text)).map(text => text.match(QUOTE)[1]), depth + 1)));
    else if (depth < 6 && ITEM.test(line)) made.append(list(run((text, place) => place === from || ITEM.test(text) ||
      /^\s+\S/.test(text) || (!text.trim() && ITEM.test(lines[place + 1] ?? ""))), depth));
    else if (line.includes("|") && ALIGN.test(lines[at + 1] ?? "") && lines[at + 1].includes("|"))
      made.append(table(run(text => text.includes("|"))));
    else made.append(make("p", {}, inline(run((text, place) => place === from || (text.trim() && !FENCE.test(text) &&
      !HEADING.test(text) && !(depth < 6 && (ITEM.test(text) || QUOTE.test(text))))).join("\n"))));
  }
  return made;
}
