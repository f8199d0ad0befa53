-- Replay: settle finished groups into the table, peek at it before a step, change weights.
-- reads and writes: run, headers, outstanding, ledger, deadletter, payload:<payload>, group:<group>, replay:*
-- owns:             replay:gaps zset  filtered groups since the last step -> issue sequence
--                   rates       hash  dataset row -> "<issue sequence> <pass rate> <1 if solved>" of the settled group that counts

local SWEPT_TOGETHER = 200 -- stale groups dropped by one call: some milliseconds of the server's time

-- Return whether a pass rate reaches the one that excludes its row; 0 excludes none.
local function solves(rate, bound)
  return bound > 0 and tonumber(rate) >= bound - 1e-8 -- sums of floats are rounded
end

-- Of a row's settled groups, keep the first issued that is solved, or if none is, the last issued. The result does not depend on
-- the order of settling. A resumed run may have another bound, so whether the kept group is solved is computed again.
local function keep_rate(prefix, row, seq, rate, bound)
  local held, solved = redis.call('HGET', prefix .. ':rates', row), solves(rate, bound)
  if held then
    local held_seq, held_rate = string.match(held, '^(%d+) (%S+)')
    local was = solves(held_rate, bound)
    if was and not solved then return end
    if was == solved and (tonumber(held_seq) < seq) == solved then return end
  end
  redis.call('HSET', prefix .. ':rates', row, string.format('%.0f', seq) .. ' ' .. rate .. ' ' .. (solved and 1 or 0))
end

-- Insert a group. A table of `capacity` groups evicts first, so its size never exceeds it; a group that is already there is
-- replaced.
local function insert(t, group, payload, seq, oldest, header, weight, variate)
  if redis.call('ZSCORE', t.key .. 'order', group) then
    leave_table(t, group)
    local old = redis.call('HGET', t.prefix .. ':group:' .. group, 'payload')
    if old ~= payload then redis.call('UNLINK', t.prefix .. ':payload:' .. old) end
  end
  while t.size >= t.capacity do drop_group(t, REMOVERS[t.remover](t), 'evicted') end
  redis.call('HSET', t.prefix .. ':group:' .. group, 'header', header, 'payload', payload, 'seq', seq, 'uses', 0)
  enter_table(t, group, seq, oldest, weight, variate)
end

-- args: leader fence, then of each header: entry, ticket, payload, action, oldest version, header, weight, variate (Exp(1)), row,
-- pass rate and the one that excludes rows ('' if they are not kept).
-- Actions: `insert`; `failed:<reason>` makes a dead letter; any other is the outcome to count (`stale`, `filtered:<reason>`).
-- An entry that was settled before is skipped, which makes a repeated call harmless. Returns how many were settled.
register_leader('settle', {
  EACH, 'entry', ENTRY, 'ticket', TEXT, 'payload', TEXT, 'action', TEXT, 'oldest version', INTEGER, 'header', TEXT, 'weight', TEXT,
  'variate', VARIATE, 'row', TEXT, 'rate', TEXT, 'bound', TEXT,
}, function(prefix, args)
  local settlements = records(args, 2, 'entry', 'ticket', 'payload', 'action', 'oldest', 'header', 'weight', 'variate', 'row', 'rate',
    'bound')
  for _, each in ipairs(settlements) do
    if each.action == 'insert' and not weight_of(each.weight) then
      return redis.error_reply('INVALID weight ' .. each.weight .. ' of group ' .. each.ticket .. ' is not in 0..1e9')
    end
    if each.row ~= '' and not (NATURAL.fits(each.row) and SHARE.fits(each.rate) and SHARE.fits(each.bound)) then
      return redis.error_reply('INVALID row ' .. each.row .. ', pass rate ' .. each.rate .. ' or bound ' .. each.bound)
    end
  end
  local t, settled, outcomes, succeeded = open_table(prefix), {}, {}, false
  for _, each in ipairs(settlements) do
    local ticket, payload, action = each.ticket, each.payload, each.action
    if redis.call('XACK', prefix .. ':headers', 'dataprep', each.entry) == 1 then
      settled[#settled + 1] = each.entry
      local seq = tonumber(redis.call('ZSCORE', prefix .. ':outstanding', ticket)) -- trust what dataprep issued, not the header
      local known = seq ~= nil
      redis.call('ZREM', prefix .. ':outstanding', ticket)
      succeeded = succeeded or known and not string.match(action, '^failed:')
      if known and each.row ~= '' then keep_rate(prefix, each.row, seq, each.rate, tonumber(each.bound)) end
      if known and action == 'insert' then
        insert(t, ticket, payload, seq, tonumber(each.oldest), each.header, weight_of(each.weight), tonumber(each.variate))
      else
        local reason = string.match(action, '^failed:(.*)')
        if not (known and keep_sample(prefix, ticket, action, each.header, payload)) and payload ~= '' then
          redis.call('UNLINK', prefix .. ':payload:' .. payload)
        end
        local outcome = not known and 'unknown_headers' or reason and 'failed' or action
        if not known or reason then
          dead_letter(prefix, ticket, reason or 'header of a ticket that is not outstanding', each.header, known and 'failed')
        else
          remember_drop(prefix, ticket, action)
          if string.match(action, '^filtered:') then redis.call('ZADD', t.key .. 'gaps', seq, ticket) end
        end
        outcomes[outcome] = (outcomes[outcome] or 0) + 1
      end
    end
  end
  close_table(t)
  if succeeded and redis.call('HEXISTS', prefix .. ':run', 'paused:dataprep') == 0 then
    -- Dead letters from here on are of tickets that fail in a row, as are those for which dataprep is paused.
    local letter = redis.call('XREVRANGE', prefix .. ':deadletter', '+', '-', 'COUNT', 1)[1]
    if letter then redis.call('HSET', prefix .. ':run', 'letter_before', letter[1]) end
  end
  for outcome, n in pairs(outcomes) do
    count(prefix, outcome, n)
    if outcome ~= 'unknown_headers' then free_slots(prefix, n) end
  end
  if #settled > 0 then
    call_over(settled, 'XDEL', prefix .. ':headers')
  end
  return #settled
end)

-- Return entries of the headers stream that are not settled: those delivered before, then new ones. Only the leader reads.
-- args: leader fence, count. Returns {entry, fields, …}.
register_leader('read_headers', {'wanted', AMOUNT}, function(prefix, args)
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

-- Before a step: drop groups that are stale for it, then return what the decision needs.
-- args: leader fence, oldest version that is fresh, groups wanted, gaps to skip. Returns at most as many of the remaining gaps as
-- there are slots: more cannot matter.
-- Returns {{name, count, …}, {times drawn, groups, …}, sequences of the remaining gaps, {group, sequence, weight, …} that the
-- sampler would draw first}.
register_leader('sweep_and_peek', {
  'oldest fresh', NATURAL, 'wanted', AMOUNT, 'passed', AMOUNT,
}, function(prefix, args)
  local t = open_table(prefix)
  local stale = redis.call('ZRANGEBYSCORE', t.key .. 'version', '-inf', '(' .. string.format('%.17g', tonumber(args[2]) * SHIFT),
    'LIMIT', 0, SWEPT_TOGETHER)
  for _, group in ipairs(stale) do drop_group(t, group, 'stale') end
  if #stale > 0 then close_table(t) end
  local wanted, passed, uses, gaps, first = tonumber(args[3]), tonumber(args[4]), {}, {}, {}
  local state = redis.call('HGETALL', t.key .. 'state')
  for i = 1, #state, 2 do
    local times = string.match(state[i], '^uses:(%d+)$')
    if times then
      uses[#uses + 1] = tonumber(times)
      uses[#uses + 1] = tonumber(state[i + 1])
    end
  end
  local found = redis.call('ZRANGE', t.key .. 'gaps', passed, passed + number(prefix, 'slots') - 1, 'WITHSCORES')
  for i = 2, #found, 2 do gaps[#gaps + 1] = tonumber(found[i]) end
  for _, group in ipairs(first_groups(t, wanted)) do
    first[#first + 1] = group
    first[#first + 1] = tonumber(redis.call('ZSCORE', t.key .. 'order', group))
    first[#first + 1] = t.weighted and redis.call('ZSCORE', t.key .. 'weight', group) or '1'
  end
  local oldest = redis.call('ZRANGE', prefix .. ':outstanding', 0, 0, 'WITHSCORES')[2]
  return {
    {
      'stale', #stale, 'size', t.size, 'outstanding', redis.call('ZCARD', prefix .. ':outstanding'),
      'oldest_outstanding', oldest and tonumber(oldest) or -1, 'inserted', t.inserted, 'drawn', t.drawn,
      'requeued', redis.call('ZCARD', prefix .. ':requeued'), 'reissue', redis.call('ZCARD', prefix .. ':reissue'),
    },
    uses, gaps, first,
  }
end)

-- args: leader fence, ordinal of the call, issue sequence. Forgets filtered groups up to it: their place was in a step that was not
-- made. Returns how many.
register_leader('pass_over', {'ordinal', NATURAL, 'until', INTEGER}, function(prefix, args)
  if overtaken(prefix .. ':replay:state', 'passed_over', args[1], args[2]) then return 0 end
  return redis.call('ZREMRANGEBYSCORE', prefix .. ':replay:gaps', '-inf', args[3])
end)

-- args: trainer fence, ordinal of the call, then group and weight of each. Skips groups that are no longer in the table. Returns how
-- many were there; 0 if a later call has come before.
register_trainer('reweigh', {'ordinal', NATURAL, EACH, 'group', TEXT, 'weight', TEXT}, function(prefix, args)
  for i = 4, #args, 2 do
    if not weight_of(args[i]) then
      return redis.error_reply('INVALID weight ' .. args[i] .. ' of group ' .. args[i - 1] .. ' is not in 0..1e9')
    end
  end
  local t, names, weights = open_table(prefix), {}, {}
  if not t.weighted or overtaken(t.key .. 'state', 'reweighed', args[1], args[2]) then return 0 end
  local last = {} -- of a group named twice, the last weight counts
  for i = 3, #args, 2 do
    if redis.call('ZSCORE', t.key .. 'weight', args[i]) then
      if not last[args[i]] then names[#names + 1] = args[i] end
      last[args[i]] = weight_of(args[i + 1])
    end
  end
  for i, group in ipairs(names) do weights[i] = last[group] end
  if #names > 0 then change_weights(t, names, weights) end
  close_table(t)
  return #names
end)

-- Weights by recency grow with every version. From time to time all are multiplied by one factor, some groups at a time; nothing is
-- drawn or inserted meanwhile, because the leader does nothing else.
-- args: leader fence, current base, new base, factor. Continues a rescaling that was begun before, with its factor. Returns
-- {groups rescaled by this call, 1 if the current base still holds, otherwise 0}.
register_leader('rescale', {'base', INTEGER, 'new base', INTEGER, 'factor', VARIATE}, function(prefix, args)
  local t = open_table(prefix)
  local state = t.key .. 'state'
  local held = redis.call('HMGET', state, 'base', 'rescaling')
  if (tonumber(held[1]) or 0) ~= tonumber(args[2]) then return {0, 0} end
  local new_base, factor, after = string.match(held[2] or '', '^(%S+) (%S+) (%S+)$')
  if not new_base then new_base, factor, after = args[3], args[4], '-1' end
  local scaled, last = scale_weights(t, tonumber(factor), after)
  close_table(t)
  if last then
    redis.call('HSET', state, 'rescaling', new_base .. ' ' .. factor .. ' ' .. last)
    return {scaled, 1}
  end
  redis.call('HSET', state, 'base', new_base)
  redis.call('HDEL', state, 'rescaling')
  return {0, 0}
end)
