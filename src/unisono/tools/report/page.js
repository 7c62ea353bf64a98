"use strict";
// Draws what each place holds as JSON, in the style sheet's colours, and again when they change.
(() => {
  const places = [...document.querySelectorAll(".plot")];
  const figures = new Map(places.map((place) => [place, JSON.parse(place.dataset.figure)]));
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 600px)");

  function coloured(value, style) {
    if (typeof value === "string") {
      return value.startsWith("var(--") ? style.getPropertyValue(value.slice(4, -1)).trim() : value;
    }
    if (Array.isArray(value)) {
      // Long rows of numbers hold no colours.
      return value.length > 8 && typeof value[0] === "number"
        ? value
        : value.map((one) => coloured(one, style));
    }
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, coloured(v, style)]));
    }
    return value;
  }

  function axis(own, style) {
    const colour = (name) => style.getPropertyValue(name).trim();
    return {
      gridcolor: colour("--grid"),
      linecolor: colour("--line"),
      zeroline: false,
      tickfont: { color: colour("--muted") },
      ...own,
      title: { standoff: 8, ...own.title, font: { size: 12, color: colour("--muted") } },
    };
  }

  function layoutOf(own, style) {
    const layout = coloured(own, style);
    const surface = style.getPropertyValue("--surface").trim();
    const result = {
      ...layout,
      legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", traceorder: "normal" },
      uirevision: "kept", // what a legend hides stays hidden in other colours
      paper_bgcolor: surface,
      plot_bgcolor: surface,
      font: {
        family: getComputedStyle(document.body).fontFamily,
        size: narrow.matches ? 11 : 12,
        color: style.getPropertyValue("--ink").trim(),
      },
      margin: narrow.matches
        ? { l: 44, r: 8, t: 30, b: 40 }
        : { l: 56, r: 12, t: 30, b: 42 },
      hoverlabel: {
        bgcolor: style.getPropertyValue("--card").trim(),
        bordercolor: style.getPropertyValue("--line").trim(),
        font: { color: style.getPropertyValue("--ink").trim() },
        align: "left",
      },
      // On a phone a finger scrolls the page.
      dragmode: narrow.matches ? false : "zoom",
      modebar: { bgcolor: "rgba(0,0,0,0)", color: style.getPropertyValue("--muted").trim() },
    };
    for (const name of ["xaxis", "yaxis"]) result[name] = axis(layout[name], style);
    if (narrow.matches) result.xaxis.nticks = 5;
    return result;
  }

  function draw() {
    const style = getComputedStyle(document.documentElement);
    for (const place of places) {
      try {
        const figure = figures.get(place);
        const data = coloured(figure.data, style);
        Plotly.react(place, data, layoutOf(figure.layout, style), {
          responsive: true,
          displaylogo: false,
          displayModeBar: narrow.matches ? false : "hover",
          modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"],
          toImageButtonOptions: { format: "svg" },
        });
      } catch (error) {
        place.textContent = `This plot cannot be drawn here: ${error.message}`;
        console.error(error);
      }
    }
  }

  dark.addEventListener("change", draw);
  narrow.addEventListener("change", draw);
  draw();
})();
