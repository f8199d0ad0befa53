-- Replay: settle finished groups into the table.
-- reads and writes: run, headers, outstanding, ledger, deadletter, payload:<payload>, group:<group>, replay:*

-- By name of the remover: which group leaves a full table.
local REMOVERS = {
  fifo = function(prefix) return redis.call('ZRANGE', prefix .. ':replay:order', 0, 0)[1] end,
}

-- A table of `size` groups has `capacity` at most afterwards; returns its size.
local function insert(prefix, group, payload, seq, oldest, header, size, capacity, remover)
  while size >= capacity do
    drop_group(prefix, remover(prefix), 'evicted')
    size = size - 1
  end
  redis.call('HSET', prefix .. ':group:' .. group, 'header', header, 'payload', payload, 'seq', seq, 'oldest', oldest, 'uses', 0)
  redis.call('ZADD', prefix .. ':replay:order', seq, group)
  redis.call('ZADD', prefix .. ':replay:version', oldest, group)
  return size + 1
end

-- args: leader fence, capacity, remover, then of each header: entry, ticket, payload, action, sequence, oldest version, header.
-- Actions: `insert`; `failed:<reason>` buries; any other is the outcome to count (`stale`, `filtered:<reason>`).
-- An entry that was settled before is passed over, which makes a repeated call harmless. Returns how many were settled.
register('settle', function(prefix, args)
  local refusal = fenced(prefix, 'leader_fence', args[1])
  if refusal then return refusal end
  local remover = REMOVERS[args[3]]
  if not remover then return redis.error_reply('NOREMOVER there is no remover ' .. args[3]) end
  local capacity, size, settled, outcomes = tonumber(args[2]), redis.call('ZCARD', prefix .. ':replay:order'), {}, {}
  for i = 4, #args, 7 do
    local entry, ticket, payload, action = args[i], args[i + 1], args[i + 2], args[i + 3]
    if redis.call('XACK', prefix .. ':headers', 'dataprep', entry) == 1 then
      settled[#settled + 1] = entry
      local known = redis.call('ZREM', prefix .. ':outstanding', ticket) == 1
      if known and action == 'insert' then
        size = insert(prefix, ticket, payload, args[i + 4], args[i + 5], args[i + 6], size, capacity, remover)
      else
        if payload ~= '' then redis.call('UNLINK', prefix .. ':payload:' .. payload) end
        local reason = string.match(action, '^failed:(.*)')
        local outcome = not known and 'unknown_headers' or reason and 'failed' or action
        if not known or reason then
          dead_letter(prefix, ticket, reason or 'header of a ticket that is not outstanding', args[i + 6])
        end
        outcomes[outcome] = (outcomes[outcome] or 0) + 1
      end
    end
  end
  for outcome, n in pairs(outcomes) do
    count(prefix, outcome, n)
    if outcome ~= 'unknown_headers' then free_slots(prefix, n) end
  end
  if #settled > 0 then
    call_over(settled, 'XDEL', prefix .. ':headers')
    ring(prefix, 'replay')
  end
  return #settled
end)

-- Entries of the headers stream that nobody settled: those delivered before first, then new ones. Only the leader reads.
-- args: leader fence, count. Returns {entry, fields, …}.
register('read_headers', function(prefix, args)
  local refusal = fenced(prefix, 'leader_fence', args[1])
  if refusal then return refusal end
  local result = {}
  for _, id in ipairs({'0', '>'}) do
    local left = tonumber(args[2]) - #result / 2
    if left > 0 then
      local reply = redis.call('XREADGROUP', 'GROUP', 'dataprep', 'leader', 'COUNT', left, 'STREAMS', prefix .. ':headers', id)
      for _, entry in ipairs(reply and reply[1][2] or {}) do
        result[#result + 1] = entry[1]
        result[#result + 1] = entry[2] or {}
      end
    end
  end
  return result
end)

-- args: leader fence, then groups. Drops groups of the table that have become stale. Returns how many were still there.
register('sweep', function(prefix, args)
  local refusal = fenced(prefix, 'leader_fence', args[1])
  if refusal then return refusal end
  local dropped = 0
  for i = 2, #args do
    if redis.call('ZSCORE', prefix .. ':replay:order', args[i]) then
      drop_group(prefix, args[i], 'stale')
      dropped = dropped + 1
    end
  end
  return dropped
end)
