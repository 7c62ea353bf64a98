// Texts of a page with too little contrast to what is behind them, each kind once, with its ratio.
() => {
  const parse = text => {
    const canvas = parse.canvas ??= document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    if (parse.known?.[text]) return parse.known[text];
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return (parse.known ??= {})[text] = [r, g, b, a / 255];
  };
  const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const light = ([r, g, b]) => [r, g, b].map(v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const found = {};
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode());) {
    const element = node.parentElement;
    if (!node.data.trim() || !element.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
    if (element.closest("script, style, noscript, .md-skip, .headerlink, svg")) continue;
    const box = element.getBoundingClientRect();
    if (!box.width || !box.height) continue;
    let behind = [255, 255, 255, 1], opacity = 1;
    const chain = [];
    for (let e = element; e; e = e.parentElement) chain.unshift(e);
    for (const e of chain) {
      const style = getComputedStyle(e);
      behind = over(parse(style.backgroundColor), behind);
      opacity *= style.opacity;
    }
    const style = getComputedStyle(element), colour = [...parse(style.color)];
    colour[3] *= opacity;
    const [a, b] = [light(over(colour, behind)), light(behind)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05), size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5)) {
      const key = `${element.tagName}.${element.className} ${style.color}`;
      found[key] ??= `${ratio.toFixed(2)} ${node.data.trim().slice(0, 30)}`;
    }
  }
  return found;
}
