(function () {
  "use strict";
  var wanted = null;
  var match = /[#&]theme=(light|dark)/.exec(location.hash);
  if (match) wanted = match[1];
  else try { wanted = localStorage.getItem("ptqpipe-theme"); } catch (error) { wanted = null; }
  if (wanted === "light" || wanted === "dark") document.documentElement.dataset.theme = wanted;
})();
