(function () {
  "use strict";
  var $ = function (id) { return document.getElementById(id); };

  // Light and dark: the system's word until the button is used.
  $("theme").addEventListener("click", function () {
    var root = document.documentElement;
    var dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    try { localStorage.setItem("ptqpipe-theme", root.dataset.theme); } catch (error) { /* a page from disk may not */ }
  });

  // One tooltip for everything that has data-tip; its text is text, whatever it holds.
  var tip = $("tip");
  function showTip(event) {
    var target = event.target.closest ? event.target.closest("[data-tip]") : null;
    if (!target) { tip.hidden = true; return; }
    tip.textContent = target.dataset.tip;
    tip.hidden = false;
    var box = tip.getBoundingClientRect();
    var x = Math.min(event.clientX + 14, innerWidth - box.width - 8);
    var y = event.clientY - box.height - 12;
    tip.style.left = Math.max(8, x) + "px";
    tip.style.top = (y < 8 ? event.clientY + 18 : y) + "px";
  }
  document.addEventListener("pointermove", showTip);
  document.addEventListener("pointerdown", showTip);
  document.addEventListener("scroll", function () { tip.hidden = true; }, { passive: true });

  // A series under the pointer stands out, in every drawing of its card.
  document.querySelectorAll(".chart-card").forEach(function (card) {
    function focus(name) {
      card.classList.toggle("focused", name !== null);
      card.querySelectorAll("[data-series]").forEach(function (part) {
        part.classList.toggle("on", part.dataset.series === name);
      });
    }
    card.addEventListener("pointerover", function (event) {
      var part = event.target.closest("[data-series]");
      focus(part ? part.dataset.series : null);
    });
    card.addEventListener("pointerleave", function () { focus(null); });
  });

  // Histograms: one role at a time.
  document.querySelectorAll(".hist").forEach(function (card) {
    card.addEventListener("click", function (event) {
      var tab = event.target.closest(".tab");
      if (!tab) return;
      card.querySelectorAll(".tab").forEach(function (other) { other.classList.toggle("on", other === tab); });
      card.querySelectorAll(".panel").forEach(function (panel) { panel.hidden = panel.dataset.panel !== tab.dataset.panel; });
    });
  });

  // Sections that fold: on a narrow page all but the first; a link to one, and the printer, open it.
  var folds = [].slice.call(document.querySelectorAll("details"));
  if (matchMedia("(max-width: 720px)").matches) {
    folds.forEach(function (fold) { if (fold.dataset.fold === "narrow") fold.open = false; });
  }
  function openTarget() {
    var target = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
    var fold = target && target.querySelector(".fold");
    if (fold) fold.open = true;
  }
  document.querySelectorAll(".links a").forEach(function (link) {
    link.addEventListener("click", function () { setTimeout(openTarget, 0); });
  });
  addEventListener("hashchange", openTarget);
  openTarget();
  var closed = [];
  addEventListener("beforeprint", function () {
    closed = folds.filter(function (fold) { return !fold.open; });
    folds.forEach(function (fold) { fold.open = true; });
  });
  addEventListener("afterprint", function () { closed.forEach(function (fold) { fold.open = false; }); });

  // The table of tensors: filtered and sorted as a list of numbers, a page of it in the document.
  if (!$("data")) return; // a comparison has none
  var data = JSON.parse($("data").textContent);
  var words = data.words, rows = data.rows, PAGE = 50;
  var OUTPUT = document.querySelector('#all [data-column="9"]') !== null; // calibrated weights have an output error
  var WORDS = { 1: true, 2: true, 8: true };
  var collator = new Intl.Collator("en", { numeric: true });
  var haystack = rows.map(function (row) {
    return (row[0] + " " + words[row[1]] + " " + words[row[2]] + " " + words[row[8]]).toLowerCase();
  });
  var order = rows.map(function (_, i) { return i; }).sort(function (a, b) { return collator.compare(rows[a][0], rows[b][0]); });
  var found = order, page = 0, sorted = null, up = true, size = PAGE;

  function value(i, column) {
    var cell = rows[i][column];
    return WORDS[column] ? words[cell] : cell;
  }
  function compare(a, b) {
    var x = value(a, sorted), y = value(b, sorted);
    if (x === null || y === null) return x === y ? a - b : x === null ? 1 : -1;
    var less = typeof x === "string" ? collator.compare(x, y) : x - y;
    return less === 0 ? a - b : up ? less : -less;
  }
  function shownSize(count) {
    var units = ["B", "kB", "MB", "GB", "TB"], unit = 0;
    while (count >= 1000 && unit < 4) { count /= 1000; unit++; }
    return (unit === 0 || count >= 100 ? count.toFixed(0) : count >= 10 ? count.toFixed(1) : count.toFixed(2)) + " " + units[unit];
  }
  function cell(row, text, kind) {
    var td = document.createElement("td");
    td.textContent = text;
    if (kind) td.className = kind;
    row.appendChild(td);
    return td;
  }
  function number(x, digits, unit) { return x === null ? "–" : x.toFixed(digits) + (unit || ""); }
  function family(word) {
    var match = /^(nvfp4|mxfp4|mxfp6|mxfp8|fp8|kept)/.exec(word);
    return match ? match[1] : "other";
  }
  function draw() {
    var pages = Math.max(1, Math.ceil(found.length / size));
    page = Math.min(page, pages - 1);
    var body = document.createElement("tbody");
    found.slice(page * size, (page + 1) * size).forEach(function (i) {
      var row = rows[i], tr = document.createElement("tr");
      var name = cell(tr, "", "name");
      row[0].split(/(?<=[._])/).forEach(function (part) {
        name.appendChild(document.createTextNode(part));
        name.appendChild(document.createElement("wbr"));
      });
      var chip = document.createElement("span");
      chip.className = "chip f-" + family(words[row[1]]);
      chip.textContent = words[row[1]];
      cell(tr, "").appendChild(chip);
      cell(tr, words[row[2]], "num");
      cell(tr, shownSize(row[3]), "num");
      cell(tr, number(row[4], 3), "num");
      if (OUTPUT) cell(tr, number(row[9], 3), "num strong");
      cell(tr, number(row[5], 2), OUTPUT ? "num" : "num strong");
      cell(tr, number(row[6], 3), "num");
      cell(tr, number(row[7], 2, " %"), "num");
      cell(tr, words[row[8]], "why");
      body.appendChild(tr);
    });
    var table = $("all");
    table.replaceChild(body, table.tBodies[0]);
    $("count").textContent = found.length === rows.length ? rows.length.toLocaleString("en") + " tensors" : found.length.toLocaleString("en") + " of " + rows.length.toLocaleString("en");
    $("page").textContent = "page " + (page + 1) + " of " + pages;
    $("back").disabled = page === 0;
    $("next").disabled = page >= pages - 1;
    document.querySelector(".pager").hidden = pages === 1;
  }
  function filter() {
    var asked = $("search").value.toLowerCase().split(/\s+/).filter(Boolean), fate = $("fate").value;
    found = order.filter(function (i) {
      return (!fate || words[rows[i][1]] === fate) && asked.every(function (word) { return haystack[i].indexOf(word) >= 0; });
    });
    if (sorted !== null) found = found.slice().sort(compare);
    page = 0;
    draw();
  }
  var fates = {};
  rows.forEach(function (row) { fates[words[row[1]]] = true; });
  Object.keys(fates).sort().forEach(function (name) {
    var option = document.createElement("option");
    option.value = option.textContent = name;
    $("fate").appendChild(option);
  });
  var waiting = 0;
  $("search").addEventListener("input", function () { clearTimeout(waiting); waiting = setTimeout(filter, 80); });
  $("fate").addEventListener("change", filter);
  $("back").addEventListener("click", function () { page--; draw(); });
  $("next").addEventListener("click", function () { page++; draw(); });
  $("all").tHead.addEventListener("click", function (event) {
    var button = event.target.closest("button");
    if (!button) return;
    var column = Number(button.dataset.column);
    up = sorted === column ? !up : true;
    sorted = column;
    $("all").tHead.querySelectorAll("th").forEach(function (th) { th.removeAttribute("aria-sort"); });
    button.parentNode.setAttribute("aria-sort", up ? "ascending" : "descending");
    filter();
  });
  addEventListener("beforeprint", function () { size = 2000; page = 0; draw(); });
  addEventListener("afterprint", function () { size = PAGE; draw(); });
  filter();
})();
