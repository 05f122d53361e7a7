// Draws the part of page.py's packed columns that is in sight. Runs once, after bokeh has drawn the
// page.

const NARROW = 4 // pixels; narrower tasks close to each other are joined into one box
const CHARACTER = 6.2 // pixels
const MARGIN = 0.3 // drawn on either side of what is in sight, as a share of it
const CLOSER = 1.5 // zooming by this factor draws anew, which shows narrower tasks

const first = (values, from, to, wanted) => {
  // the first index between from and to whose value exceeds the wanted one; values ascend
  while (from < to) {
    const middle = (from + to) >> 1
    if (values[middle] > wanted) to = middle
    else from = middle + 1
  }
  return from
}

const offsets = (counts) => {
  const starts = new Int32Array(counts.length + 1)
  counts.forEach((count, at) => (starts[at + 1] = starts[at] + count))
  return starts
}

const size = (count) => {
  let unit = 0
  for (; count >= 1023.95 && unit < 4; unit++) count /= 1024
  return `${count.toFixed(unit ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`
}

const short = (time) => `${Number(time.toPrecision(6))}`

async function unpack(blob, views) {
  const packed = Uint8Array.from(atob(blob), (character) => character.charCodeAt(0))
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))
  const bytes = await new Response(stream).arrayBuffer()
  let at = 0
  return views.map((view) => {
    const unpacked = { ...view, first: offsets(view.rows), points: offsets(view.points) }
    for (const [name, type, count] of view.columns) {
      const Column = globalThis[type]
      const stop = at + count * Column.BYTES_PER_ELEMENT
      unpacked[name] = new Column(bytes.slice(at, stop))
      at = stop
    }
    const { first, level, start, waits } = unpacked
    unpacked.awaited = offsets(waits)
    unpacked.device = Int32Array.from({ length: start.length })
    view.rows.forEach((_, row) => unpacked.device.fill(row, first[row], first[row + 1]))
    unpacked.most = level.reduce((most, count) => Math.max(most, count), 0)
    unpacked.hits = null
    return unpacked
  })
}

const letter = (view, k) => view.looks[view.look[k]][0]
const name = (view, k, stage = view.stages) =>
  letter(view, k) +
  (view.microbatch[k] < 0 ? "" : view.microbatch[k]) +
  (view.batches ? `b${view.batch[k]}` : "") +
  (stage && view.stage[k] >= 0 ? `@${view.stage[k]}` : "")

function boxes(view, from, to, pixel) {
  const data = { left: [], right: [], top: [], bottom: [], colour: [], alpha: [], at: [], count: [] }
  const texts = { x: [], y: [], text: [] }
  const { start, end, hits } = view
  const narrow = NARROW * pixel
  const shown = (k) => hits === null || hits.has(k)
  for (let row = 0; row < view.rows.length; row++) {
    const stop = view.first[row + 1]
    let k = first(end, view.first[row], stop, from)
    while (k < stop && start[k] < to) {
      const begin = k
      let most = view.look[k]
      let hit = shown(k)
      let right = end[k]
      if (right - start[k] < narrow) {
        const times = {}
        for (; k < stop && end[k] - start[begin] < narrow && start[k] - right < pixel; k++) {
          const look = view.look[k]
          right = end[k]
          times[look] = (times[look] || 0) + right - start[k]
          if (times[look] > times[most]) most = look
          if (!hit && shown(k)) [hit, most] = [true, look]
        }
        right = Math.max(right, start[begin] + pixel)
      } else {
        k++
        const room = (right - start[begin]) / pixel
        const text = [name(view, begin), name(view, begin, false)].find(
          (text) => text.length * CHARACTER + 3 < room,
        )
        if (text) {
          texts.x.push((start[begin] + right) / 2)
          texts.y.push(row)
          texts.text.push(text)
        }
        if (room > 2 * NARROW) right -= pixel // a line of background between neighbours
      }
      data.left.push(start[begin])
      data.right.push(right)
      data.top.push(row - 0.4)
      data.bottom.push(row + 0.4)
      data.colour.push(view.looks[most][2])
      data.alpha.push(hit ? 1 : 0.2)
      data.at.push(begin)
      data.count.push(k - begin)
    }
  }
  return [data, texts]
}

function curves(view, from, to, pixel) {
  // step functions; of each column of pixels only the lowest, the highest and the last level
  const data = { xs: [], ys: [], colour: [], device: [] }
  const { when, level } = view
  for (let row = 0; row < view.rows.length; row++) {
    const [begin, stop] = [view.points[row], view.points[row + 1]]
    const [xs, ys] = [[], []]
    let k = Math.max(begin, first(when, begin, stop, from) - 1)
    let last = null
    while (k < stop && when[k] < to) {
      const at = when[k]
      let [low, high] = [level[k], level[k]]
      for (; k < stop && when[k] < at + pixel; k++) {
        low = Math.min(low, level[k])
        high = Math.max(high, level[k])
      }
      if (last !== null) xs.push(at), ys.push(last)
      last = level[k - 1]
      for (const y of low < high ? [low, high, last] : [last]) xs.push(at), ys.push(y)
    }
    if (last !== null) {
      xs.push(k < stop ? when[k] : view.end[view.first[row + 1] - 1])
      ys.push(last)
    }
    data.xs.push(xs)
    data.ys.push(ys)
    data.colour.push(view.colours[row])
    data.device.push(row)
  }
  return data
}

function tell(view, k) {
  const held = (count) => (view.bytes ? size(count) : `${count} micro-batches`)
  const kind = view.looks[view.look[k]][1]
  const lines = [`${name(view, k, true)}: ${kind}, device ${view.device[k]}`]
  if (view.stage[k] >= 0) lines.push(`stage ${view.stage[k]}`)
  if (view.microbatch[k] >= 0) lines.push(`micro-batch ${view.microbatch[k]}`)
  if (view.batches) lines.push(`batch ${view.batch[k]}`)
  lines.push(`version ${view.version[k]} of the weights`)
  const [start, end] = [view.start[k], view.end[k]]
  lines.push(`${short(start)} to ${short(end)}: takes ${short(end - start)}`)
  lines.push(`device holds ${held(view.holds[k])}`)
  if (view.receives[k]) lines.push(`receives ${size(view.receives[k])}`)
  for (let w = view.awaited[k]; w < view.awaited[k + 1]; w++) {
    const maker = view.maker[w]
    const done = `done ${short(view.end[maker])}`
    const there = view.arrival[w] > view.end[maker] ? `, here ${short(view.arrival[w])}` : ""
    lines.push(
      `waits for ${name(view, maker, true)} of device ${view.device[maker]} (${done}${there})`,
    )
  }
  const before = k - 1
  if (before >= view.first[view.device[k]]) {
    lines.push(`after ${name(view, before, true)} (done ${short(view.end[before])})`)
  }
  return lines.join("\n")
}

function matcher(text) {
  // F3b1@2, or parts of it
  const parts = /^([a-z]?)(\d*)(?:b(-?\d+))?(?:@(\d+))?$/i.exec(text.trim())
  if (parts === null || !text.trim()) return null
  const [kind, microbatch, batch, stage] = parts.slice(1)
  return (view, k) =>
    (!kind || letter(view, k) === kind.toUpperCase()) &&
    (!microbatch || view.microbatch[k] === Number(microbatch)) &&
    (!batch || view.batch[k] === Number(batch)) &&
    (!stage || view.stage[k] === Number(stage))
}

export default async ({ views, sight, plot, search, found, blob }) => {
  const simulations = await unpack(blob, views)
  simulations[0].height.end = 1.05 * Math.max(1, ...simulations.map((view) => view.most))
  let drawn = null

  const show = () => {
    const width = sight.end - sight.start
    const pixel = width / Math.max(plot.inner_width || 0, 200)
    const fits =
      drawn !== null &&
      sight.start >= drawn.from &&
      sight.end <= drawn.to &&
      pixel < drawn.pixel * CLOSER &&
      pixel > drawn.pixel / CLOSER
    if (fits) return
    drawn = { from: sight.start - MARGIN * width, to: sight.end + MARGIN * width, pixel }
    for (const view of simulations) {
      const [data, texts] = boxes(view, drawn.from, drawn.to, pixel)
      view.boxes.data = data
      view.texts.data = texts
      view.lines.data = curves(view, drawn.from, drawn.to, pixel)
    }
  }
  const again = () => {
    drawn = null
    show()
  }

  let [hits, next] = [[], 0]
  const find = () => {
    const wanted = matcher(search.value_input)
    hits = []
    next = 0
    for (const view of simulations) {
      view.hits = wanted && new Set()
      for (let k = 0; wanted && k < view.start.length; k++) {
        if (wanted(view, k)) view.hits.add(k), hits.push([view, k])
      }
    }
    const wrong = search.value_input.trim() && !wanted
    found.text = wrong ? "write a task as F3@1" : wanted ? `${hits.length} tasks` : ""
    again()
  }
  const go = () => {
    if (!hits.length) return
    const [view, k] = hits[next]
    const width = Math.min(sight.end - sight.start, 40 * (view.end[k] - view.start[k]) || 1)
    const middle = (view.start[k] + view.end[k]) / 2
    sight.setv({ start: middle - width / 2, end: middle + width / 2 })
    next = (next + 1) % hits.length
    found.text = `${next || hits.length} of ${hits.length} tasks: ${name(view, k, true)}, ${view.what}`
  }

  globalThis.fxpipe = {
    views: simulations,
    tell: (number, data, index) => {
      const [view, k, count] = [simulations[number], data.at[index], data.count[index]]
      if (count === 1) return tell(view, k)
      const last = k + count - 1
      return `${count} tasks, ${name(view, k, true)} to ${name(view, last, true)}; zoom in`
    },
    level: (number, device, at) => {
      const view = simulations[number]
      const k = first(view.when, view.points[device], view.points[device + 1], at) - 1
      const count = k < view.points[device] ? 0 : view.level[k]
      const held = view.bytes ? size(count) : `${count} micro-batches`
      return `device ${device}, ${view.what}: ${held} at ${short(at)}`
    },
    point: (number, indices) => {
      const view = simulations[number]
      const data = { x0: [], y0: [], x1: [], y1: [] }
      const index = indices[0]
      if (index !== undefined && view.boxes.data.count[index] === 1) {
        const k = view.boxes.data.at[index]
        for (let w = view.awaited[k]; w < view.awaited[k + 1]; w++) {
          data.x0.push(view.end[view.maker[w]])
          data.y0.push(view.device[view.maker[w]])
          data.x1.push(view.start[k])
          data.y1.push(view.device[k])
        }
      }
      if (data.x0.length || view.ways.data.x0.length) view.ways.data = data
    },
  }
  sight.connect(sight.change, show)
  plot.connect(plot.properties.inner_width.change, again)
  search.connect(search.properties.value_input.change, find)
  search.on_event("value_submit", go)
  show()
}
