"use strict";
(() => {
  const tip = document.getElementById("tip");

  const place = (event) => {
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const right = event.clientX + 14 + box.width < innerWidth - 4;
    tip.style.left = Math.max(4, right ? event.clientX + 14 : event.clientX - 14 - box.width) + "px";
    tip.style.top = Math.max(4, Math.min(innerHeight - box.height - 4, event.clientY + 14)) + "px";
  };

  const row = (color, text) => {
    const line = document.createElement("div");
    if (color) {
      const dot = document.createElement("i");
      if (/^s\d$/.test(color)) dot.className = color; else dot.style.setProperty("--c", color);
      line.append(dot);
    }
    line.append(text);
    return line;
  };

  const hide = (plot) => {
    tip.hidden = true;
    plot?.querySelector(".cursor")?.setAttribute("hidden", "");
  };

  const showNearest = (plot, points, hidden, event) => {
    const box = plot.getBoundingClientRect();
    const scale = plot.viewBox.baseVal.width / box.width;
    const [left, right] = [Number(plot.dataset.left), Number(plot.dataset.right)];
    const at = ((event.clientX - box.left) * scale - left) / (right - left);
    const distance = (point) => Math.abs(point[0] - at);
    const shown = points.filter((point) => point[2].some((series) => !hidden.has(series[1])));
    if (!shown.length || at < -0.05 || at > 1.05) return hide(plot);
    const [where, label, series] = shown.reduce((best, point) => (distance(point) < distance(best) ? point : best));
    const cursor = plot.querySelector(".cursor");
    const x = left + where * (right - left);
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    cursor.removeAttribute("hidden");
    const rows = series.filter((item) => !hidden.has(item[1])).map((item) => row(item[0], `${item[1]} ${item[2]}`));
    tip.replaceChildren(row("", label), ...rows);
    place(event);
  };

  for (const figure of document.querySelectorAll("figure")) {
    const points = JSON.parse(figure.dataset.hover);
    const hidden = new Set();
    for (const plot of figure.querySelectorAll("svg.plot")) {
      plot.addEventListener("pointermove", (event) => showNearest(plot, points, hidden, event));
      plot.addEventListener("pointerdown", (event) => showNearest(plot, points, hidden, event));
      plot.addEventListener("pointerleave", () => hide(plot));
    }
    for (const button of figure.querySelectorAll(".legend button")) {
      button.addEventListener("click", () => {
        const name = button.dataset.series;
        const show = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(show));
        if (show) hidden.delete(name); else hidden.add(name);
        for (const series of figure.querySelectorAll(".series")) {
          if (series.dataset.name === name) series.toggleAttribute("hidden", !show);
        }
      });
    }
    for (const button of figure.querySelectorAll(".tabs button")) {
      button.addEventListener("click", () => {
        for (const other of figure.querySelectorAll(".tabs button")) other.setAttribute("aria-pressed", String(other === button));
        for (const view of figure.querySelectorAll(".view")) view.hidden = view.dataset.view !== button.dataset.view;
      });
    }
  }

  const showCell = (event) => {
    const text = event.target.dataset?.tip;
    if (!text) return;
    tip.replaceChildren(text);
    place(event);
  };
  for (const map of document.querySelectorAll(".heat-map")) {
    map.addEventListener("pointermove", showCell);
    map.addEventListener("pointerdown", showCell);
    map.addEventListener("pointerleave", () => hide(null));
  }
})();
